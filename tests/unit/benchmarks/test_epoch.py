"""An epoch by every path, and the baseline computes what it should."""

import torch

from megagraph.attention.bias import DenseBias
from megagraph.attention.slot import dense_attention

TINY = ["--source", "planted", "--nodes", 150, "--batch", 50, "--sampled", 4]
TINY += ["--layers", 2, "--heads", 2, "--hidden", 8, "--ffn", 8]


def test_epoch_compares_every_path(script):
    body = script("epoch", *TINY, "--repeats", 2)
    assert {"layers": 2, "heads": 2, "layout": "pp1 cp1 dp1", "num_nodes": 150}.items() <= body["config"].items()
    rows = {row["path"]: row for row in body["rows"]}
    assert [(path, row["attention"], row["compat"]) for path, row in rows.items()] == [
        ("tiled", "tiled", "none"),
        ("dense", "dense", "ansgt"),
        ("ansgt", "dense", "ansgt"),
    ]
    for row in rows.values():
        assert (row["batch"], row["steps_per_epoch"], row["tokens"], row["samples"]) == (45, 2, 7, 1)
        assert len(row["seconds_all"]) == len(row["cpu_seconds_all"]) == 2
    # The baselines keep ids, bias and labels of 150 sequences and of the padding; ours keeps nothing.
    assert rows["tiled"]["stored_bytes"] == 0
    assert rows["dense"]["stored_bytes"] >= 151 * 4 * 7 * 7 * 4
    # ANS-GT's own last layer computes all rows, and its projection needs the channels once more.
    assert rows["ansgt"]["peak_bytes"] > rows["dense"]["peak_bytes"]
    for path in ("dense", "ansgt"):
        assert body["ratios"][path]["peak_bytes"] == rows["tiled"]["peak_bytes"] / rows[path]["peak_bytes"]
        assert set(body["ratios"][path]) == {"seconds", "cpu_seconds", "peak_bytes"}


def test_epoch_compares_accuracies(script):
    words = ["--accuracy", "--seeds", 2, "--epochs", 3, "--paths", "tiled", "dense", "--eval-samples", 1]
    body = script("epoch", *TINY, *words)
    assert [(row["seed"], row["path"]) for row in body["rows"]] == [
        (0, "tiled"),
        (0, "dense"),
        (1, "tiled"),
        (1, "dense"),
    ]
    assert all(row["epoch"] in (2, 3) and 0 <= row["test_accuracy"] <= 1 for row in body["rows"])
    means = body["mean_test_accuracy"]
    assert body["ratios"] == {"dense": {"accuracy_points": 100 * (means["tiled"] - means["dense"])}}


def test_the_median_ratio_is_of_the_same_round(module):
    epoch = module("epoch")
    assert epoch.paired([1.0, 10.0, 2.0], [2.0, 20.0, 8.0]) == 0.5


def test_what_ansgt_ships_is_the_dense_path_without_dropout(module):
    """The baseline computes the same attention: float64, dropout off."""
    shipped = module("shipped")
    torch.manual_seed(0)
    channels = torch.rand(3, 4, 6, 6, dtype=torch.float64)
    channels[..., -1] = 0
    channels[..., -1, :] = 0
    q, k, v, dout = (torch.randn(3, 2, 6, 5, dtype=torch.float64) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v, torch.randn(2, 5, dtype=torch.float64))]
    results = []
    for attend in (shipped.shipped_attention(channels, 1), dense_attention(DenseBias.full(channels, 1))):
        out = attend(*leaves, None)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    for ours, truth in zip(*results, strict=True):
        assert (ours - truth).abs().max() <= 1e-12
