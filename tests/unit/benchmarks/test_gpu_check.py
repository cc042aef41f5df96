"""What runs on a CPU, what does not, and what happens to a case that fails or comes too late."""

import json
import sys

import pytest

SMALL = ["--device", "cpu", "--check-tokens", 9, "--tokens", 16, "--head-dims", 8, "--repeats", 1]
SMALL += ["--layers", 1, "--batch", 8, "--nodes", 100, "--features", 4]


def test_gpu_check_records_what_ran_and_what_did_not(script):
    words = ["--sections", "correct", "--backends", "tiled", "triton", "--budget", 250]
    body = script("gpu_check", *SMALL, *words)
    assert {"heads": 8, "channels": 4, "layout": "pp1 cp1 dp1", "check_tokens": 9}.items() <= body["config"].items()
    correct = [row for row in body["rows"] if row["section"] == "correct" and row["backend"] == "tiled"]
    assert [(row["dtype"], row["dropout"], row["ok"]) for row in correct] == [
        ("float32", 0.0, True),
        ("float32", 0.1, True),
        ("bfloat16", 0.0, True),
        ("bfloat16", 0.1, True),
    ]
    assert all(set(row["errors"]) == {"out", "dq", "dk", "dv", "dweight"} for row in correct)
    not_run = [row for row in body["rows"] if row.get("backend") == "triton"]
    assert not_run == [{"section": "correct", "backend": "triton", "status": "not run here (needs CUDA)"}]


def test_gpu_check_skips_what_no_time_is_left_for(script):
    body = script("gpu_check", *SMALL, "--budget", 0)
    assert {row["status"] for row in body["rows"]} == {"skipped", "not run here (needs CUDA)"}
    assert {row["section"] for row in body["rows"]} == {"correct", "speed", "epoch", "memory"}


@pytest.fixture
def child(module, monkeypatch, capsys):
    """The rows of one section, measured in this process."""

    def run(section, backend="-", *words):
        arguments = [*SMALL, "--out", "none", "--child", section, backend, *words]
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *map(str, arguments)])
        module("gpu_check").main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]

    return run


def test_a_failing_case_is_recorded_and_the_others_run(child, module, monkeypatch):
    sections = module("gpu_sections")
    fill = sections.filled

    def filled(backend, channels, head_dim):
        if head_dim == 16:
            raise RuntimeError("no such kernel\nmore words")
        return fill(backend, channels, head_dim)

    monkeypatch.setattr(sections, "filled", filled)
    rows = child("speed", "sdpa", "--head-dims", 16, 8)
    assert [(row["head_dim"], row["status"]) for row in rows] == [(16, "failed"), (8, "ok")] * 2
    assert rows[0]["why"] == "RuntimeError: no such kernel"
    assert rows[1]["seconds"] > 0 and rows[1]["bytes_above_inputs"] > 0


def test_gpu_check_trains_an_epoch_and_predicts_memory(script):
    body = script("gpu_check", *SMALL, "--sections", "epoch", "memory", "--budget", 250)
    trained = [row for row in body["rows"] if row["section"] == "epoch"]
    assert [(row["attention"], row["status"], row["batch"], row["tokens"]) for row in trained] == [
        ("tiled", "ok", 8, 17),
        ("dense", "ok", 8, 17),
    ]
    # The same model, the same sequences: the two paths of attention give the same loss.
    assert trained[0]["loss"] == pytest.approx(trained[1]["loss"], abs=1e-5)
    memory = [row for row in body["rows"] if row["section"] == "memory"]
    assert {(row["attention"], row["batch"]) for row in memory} == {
        (attention, batch) for attention in ("tiled", "dense") for batch in (2, 8)
    }
    for row in memory:
        assert row["predicted_over_allocated"] == row["predicted_bytes"] / row["allocated_bytes"] > 0


def test_a_child_beyond_its_time_is_ended(module, monkeypatch):
    check = module("gpu_check")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", "none"])
    (row,) = check.spawn({"section": "correct", "backend": "tiled"}, 0.05)
    assert row == {"section": "correct", "backend": "tiled", "status": "failed", "why": "ended at its time limit"}
