"""Whole runs through the trainer: equal in every layout, resumed under another one, stopped by a bad number."""

import csv

import numpy as np
import pytest
from engine_case import write_planted

from megagraph.artifacts import GraphManifest, RunSummary
from megagraph.config import RunConfig, UserError

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    write_planted(folder, feature_noise=0.3)
    return folder


UNION = {"builder": "union", "seeds_per_sequence": 7, "num_sampled": 1, "powers": "induced"}


def run_config(plan, world_size=1, epochs=4, sampling=None, **train):
    return RunConfig.model_validate(
        {
            "id": "small",
            "dataset": "small",
            "model": {"layers": 4, "heads": 2, "hidden": 8, "ffn": 8, "bias_channels": 2},
            "sampling": {"num_sampled": 4, "eval_samples": 2, "samples": 2, **(sampling or {})},
            "train": {
                "batch": 30, "epochs": epochs, "peak_lr": 1e-2, "warmup_epochs": 1, "dtype": "float64",
                "checkpoint_every": 2, **train,
            },
            "parallel": {"world_size": world_size, "plan": plan, "timeout_seconds": 60.0},
        }
    )  # fmt: skip


def train_rank(run, data, out, resume=False):
    from megagraph.train.trainer import train

    train(run, data, out, resume="strict" if resume else "no")


def losses(out):
    with (out / "epochs.csv").open() as handle:
        return [(float(row["loss"]), row["val_accuracy"]) for row in csv.DictReader(handle)]


def assert_same(first, second):
    assert np.abs(np.array([a for a, _ in first]) - np.array([b for b, _ in second])).max() <= 1e-10
    assert [a for _, a in first] == [b for _, b in second]


MANIFEST = GraphManifest(
    name="small",
    source="planted",
    num_nodes=120,
    num_edges=0,
    num_features=8,
    num_classes=3,
    undirected=True,
    self_loops=0,
    public_split=False,
)

LAYOUTS = [
    ({"layers": [4], "microbatches": 3}, 1),
    ({"dp": 2, "layers": [4]}, 2),
    ({"cp": 2, "layers": [4], "microbatches": 2}, 2),
    ({"pp": 2, "layers": [1, 3], "microbatches": 2}, 2),
    ({"pp": 2, "dp": 2, "layers": [3, 1]}, 4),
]


@pytest.fixture(scope="module")
def uninterrupted(run_ranks, data, tmp_path_factory):
    """Four epochs on one rank."""
    out = tmp_path_factory.mktemp("single")
    run_ranks(1, train_rank, run_config({"layers": [4]}), data, out)
    return out


@pytest.mark.parametrize(("plan", "world_size"), LAYOUTS, ids=[str(plan) for plan, _ in LAYOUTS])
def test_every_layout_trains_the_same(run_ranks, data, uninterrupted, tmp_path, plan, world_size):
    run_ranks(world_size, train_rank, run_config(plan, world_size), data, tmp_path)
    assert_same(losses(tmp_path), losses(uninterrupted))
    summary = RunSummary.load(tmp_path / "summary.json")
    single = RunSummary.load(uninterrupted / "summary.json")
    assert summary.num_parameters == single.num_parameters
    assert summary.test_accuracy == single.test_accuracy
    assert len(summary.peak_bytes) == world_size
    assert min(summary.peak_bytes) > 0


@pytest.mark.parametrize(("plan", "world_size"), LAYOUTS[:4], ids=[str(plan) for plan, _ in LAYOUTS[:4]])
def test_union_trains_the_same_in_every_layout(run_ranks, data, tmp_path, plan, world_size):
    single, many = tmp_path / "single", tmp_path / "many"
    run_ranks(1, train_rank, run_config({"layers": [4]}, epochs=2, sampling=UNION), data, single)
    run_ranks(world_size, train_rank, run_config(plan, world_size, epochs=2, sampling=UNION), data, many)
    assert_same(losses(many), losses(single))
    assert RunSummary.load(many / "summary.json").num_tokens == 14 + 12 + 1


def test_without_prefetching_every_number_is_the_same(run_ranks, data, uninterrupted, tmp_path):
    run_ranks(1, train_rank, run_config({"layers": [4]}, prefetch=False), data, tmp_path)
    assert losses(tmp_path) == losses(uninterrupted)
    for folder in (tmp_path, uninterrupted):
        assert 0 < RunSummary.load(folder / "summary.json").data_seconds_fraction < 1


def test_learned_shares_are_the_same_in_every_layout_and_after_resuming(run_ranks, data, tmp_path):
    single, resumed = tmp_path / "single", tmp_path / "resumed"
    sampling = {"adaptive": {"period": 1}}
    run_ranks(1, train_rank, run_config({"layers": [4]}, sampling=sampling), data, single)
    first = run_config({"pp": 2, "dp": 2, "layers": [1, 3]}, 4, sampling=sampling)
    run_ranks(4, interrupted_rank, first, data, resumed)
    run_ranks(2, train_rank, run_config({"cp": 2, "layers": [4]}, 2, sampling=sampling), data, resumed, True)
    assert_same(losses(resumed), losses(single))
    shares = RunSummary.load(single / "summary.json").heuristic_shares
    assert RunSummary.load(resumed / "summary.json").heuristic_shares == pytest.approx(shares, abs=1e-12)
    assert shares["ppr"] != pytest.approx(0.5, abs=1e-3)


def test_resumes_under_another_layout(run_ranks, data, uninterrupted, tmp_path):
    first = run_config({"pp": 2, "dp": 2, "layers": [1, 3]}, 4, epochs=4)
    run_ranks(4, interrupted_rank, first, data, tmp_path)
    assert not (tmp_path / "summary.json").exists()
    second = run_config({"cp": 2, "layers": [4]}, 2)
    run_ranks(2, train_rank, second, data, tmp_path, True)
    assert_same(losses(tmp_path), losses(uninterrupted))


def interrupted_rank(run, data, out):
    """Stops in epoch 3, after the checkpoint of epoch 2."""
    from megagraph.train import trainer

    class StoppedError(Exception):
        pass

    whole_epoch = trainer.Training.epoch

    def epoch(self, number, after_step):
        if number == 3:
            raise StoppedError
        return whole_epoch(self, number, after_step)

    trainer.Training.epoch = epoch
    with pytest.raises(StoppedError):
        trainer.train(run, data, out)


def test_checkpoint_of_other_settings_is_refused(run_ranks, data, uninterrupted):
    other = run_config({"layers": [4]}, peak_lr=5e-3)
    assert "peak_lr" in run_ranks(1, refused, other, data, uninterrupted, True)[0]


def test_nan_loss_is_one_line_and_leaves_no_result(run_ranks, data, tmp_path):
    run = run_config({"layers": [4]}, peak_lr=1e300)
    message = run_ranks(1, refused, run, data, tmp_path)[0]
    assert "loss is nan" in message or "loss is inf" in message
    assert "peak_lr" in message
    assert "\n" not in message
    assert not list(tmp_path.glob("*.json")) + list(tmp_path.glob("*.csv"))


def test_a_plan_of_more_ranks_than_started_is_refused(run_ranks, data, tmp_path):
    run = run_config({"dp": 2, "layers": [4]}, 2)
    assert "--tasks 2" in run_ranks(1, refused, run, data, tmp_path)[0]


def refused(run, data, out, resume=False):
    with pytest.raises(UserError) as caught:
        train_rank(run, data, out, resume)
    return str(caught.value)


def test_out_of_memory_on_one_rank_is_a_result(run_ranks, data, tmp_path):
    run_ranks(1, starved_rank, run_config({"layers": [4]}), data, tmp_path)
    summary = RunSummary.load(tmp_path / "summary.json")
    assert (summary.status, summary.epochs) == ("oom", 0)
    assert (tmp_path / "epochs.csv").exists()


def starved_rank(run, data, out):
    """The first step asks the CPU allocator for more than any machine has."""
    import torch

    from megagraph.train import trainer

    trainer.Training.epoch = lambda self, *_: torch.empty(1 << 60, dtype=torch.uint8)
    trainer.train(run, data, out)


def test_export_is_one_file_of_the_whole_model(run_ranks, data, uninterrupted, tmp_path):
    """Saved under two stages, exported without a process group: the weights of the single process."""
    from megagraph.train.export import export, load_exported

    (data / "manifest.json").write_text(MANIFEST.model_dump_json().replace("{", '{"schema": "megagraph.graph/1", ', 1))
    plan = {"pp": 2, "layers": [1, 3], "microbatches": 2}
    run = run_config(plan, 2)
    run_ranks(2, train_rank, run, data, tmp_path)
    export(run, data, tmp_path, tmp_path / "model.safetensors")
    single = run_config({"layers": [4]})
    export(single, data, uninterrupted, tmp_path / "single.safetensors")
    model, config = load_exported(tmp_path / "model.safetensors")
    truth, _ = load_exported(tmp_path / "single.safetensors")
    assert config == run
    for (name, parameter), (_, expected) in zip(model.named_parameters(), truth.named_parameters(), strict=True):
        assert (parameter - expected).abs().max() <= 1e-10, name
    wider = run.model_copy(update={"model": run.model.model_copy(update={"hidden": 16})})
    with pytest.raises(UserError, match="another model"):
        export(wider, data, tmp_path, tmp_path / "wider.safetensors")
    assert not (tmp_path / "wider.safetensors").exists()
