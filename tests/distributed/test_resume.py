"""A run that stopped anywhere goes on to the same numbers, under whatever layout; float64, dropout and learning on."""

import csv
import hashlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from engine_case import write_planted

from megagraph.artifacts import GraphManifest, RunSummary
from megagraph.config import RunConfig
from megagraph.files import read_json

pytestmark = pytest.mark.distributed

EPOCHS, STEPS = 4, 3
SINGLE = {"layers": [4]}
UNEVEN = {"pp": 2, "dp": 2, "layers": [1, 3]}
LAYOUTS = [
    ({"layers": [4], "microbatches": 3}, 1),
    ({"dp": 2, "layers": [4]}, 2),
    ({"cp": 2, "layers": [4], "microbatches": 2}, 2),
    ({"pp": 2, "layers": [3, 1], "microbatches": 2, "schedule": "1f1b", "recompute": [1, 0]}, 2),
    ({"pp": 2, "cp": 2, "layers": [2, 2], "microbatches": 2}, 4),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    graph = write_planted(folder, feature_noise=0.3)
    GraphManifest(
        name="small",
        source="planted",
        num_nodes=120,
        num_edges=graph.num_edges,
        num_features=8,
        num_classes=3,
        undirected=True,
        self_loops=0,
        public_split=False,
    ).save(folder / "manifest.json")
    return folder


def run_config(plan=SINGLE, **train):
    """Three steps an epoch; by default a checkpoint after step 2 of epoch 2 and after step 1 of epoch 4."""
    settings = {
        "batch": 30, "epochs": EPOCHS, "peak_lr": 1e-2, "warmup_epochs": 2, "dtype": "float64",
        "checkpoint_every": 100, "checkpoint_steps": 5,
    }  # fmt: skip
    world_size = plan.get("pp", 1) * plan.get("cp", 1) * plan.get("dp", 1)
    return RunConfig.model_validate(
        {
            "id": "small",
            "dataset": "small",
            "model": {"layers": 4, "heads": 2, "hidden": 8, "ffn": 8, "bias_channels": 2},
            "sampling": {"num_sampled": 4, "eval_samples": 2, "samples": 2, "adaptive": {"period": 1}},
            "train": settings | train,
            "parallel": {"world_size": world_size, "plan": plan, "timeout_seconds": 60.0},
        }
    )


class StoppedError(Exception):
    pass


def observed(run, data, out, resume="no", most=1000):
    """(epoch, step, loss, hash of this rank's batch) of at most `most` steps; then the run stops."""
    from megagraph.train import trainer

    seen, step_of = [], trainer.Training._step

    def step(self, passes, num_centres, epoch, step):
        if len(seen) == most:
            raise StoppedError
        total, passes = hashlib.sha256(), list(passes)
        for tensor in (tensor for parts in passes for part in parts for tensor in part.tensors()):
            total.update(tensor.numpy().tobytes())
        loss = step_of(self, iter(passes), num_centres, epoch, step)
        seen.append((epoch, step, loss, total.hexdigest()))
        return loss

    trainer.Training._step = step
    try:
        trainer.train(run, data, out, resume=resume)
    except StoppedError:
        assert len(seen) == most
    return seen


@pytest.fixture(scope="module")
def uninterrupted(run_ranks, data, tmp_path_factory):
    """A whole run on one rank: its folder and steps."""
    out = tmp_path_factory.mktemp("single")
    (steps,) = run_ranks(1, observed, run_config(), data, out)
    assert len(steps) == EPOCHS * STEPS
    return out, steps


@pytest.fixture(scope="module")
def stopped(run_ranks, data, tmp_path_factory):
    """Four ranks, uneven stages, stopped in epoch 2 after the checkpoint of its second step."""
    out = tmp_path_factory.mktemp("stopped")
    run_ranks(4, observed, run_config(UNEVEN), data, out, "no", 5)
    assert names(out) == ["000001-000002"]
    return out


def names(out):
    return sorted(path.name for path in (out / "checkpoint").iterdir())


def rows(out):
    with (out / "epochs.csv").open() as handle:
        kept = ("epoch", "loss", "lr", "val_accuracy", "test_accuracy")
        return [tuple(float(row[key]) for key in kept) for row in csv.DictReader(handle)]


@pytest.mark.parametrize(("plan", "world_size"), LAYOUTS, ids=[str(plan) for plan, _ in LAYOUTS])
def test_goes_on_within_an_epoch_under_another_layout(
    run_ranks, data, uninterrupted, stopped, tmp_path, plan, world_size
):
    """The rest of the epoch, what it leads the sampling to learn, and the epoch after."""
    shutil.copytree(stopped / "checkpoint", tmp_path / "checkpoint")
    _, truth = uninterrupted
    for steps in run_ranks(world_size, observed, run_config(plan), data, tmp_path, "strict", 3):
        assert [step[:2] for step in steps] == [(2, 2), (3, 0), (3, 1)]
        for (*_, loss, _), (*_, expected, _) in zip(steps, truth[5:8], strict=True):
            assert loss == pytest.approx(expected, abs=1e-10)


def test_on_one_rank_every_bit_is_the_same(run_ranks, data, uninterrupted, tmp_path):
    single, truth = uninterrupted
    run_ranks(1, observed, run_config(), data, tmp_path, "no", 6)
    (steps,) = run_ranks(1, observed, run_config(), data, tmp_path, "auto")
    assert steps == truth[5:]
    assert rows(tmp_path) == rows(single)
    summaries = [RunSummary.load(folder / "summary.json") for folder in (tmp_path, single)]
    for key in ("heuristic_shares", "test_accuracy", "final_test_accuracy", "best_epoch", "val_accuracy"):
        assert getattr(summaries[0], key) == getattr(summaries[1], key)
    assert summaries[0].peak_bytes[0] == pytest.approx(summaries[1].peak_bytes[0], rel=0.05)


def test_keeps_the_last_n_of_every_kind(run_ranks, data, tmp_path):
    run = run_config(checkpoint_steps=2, checkpoint_every=3, keep_checkpoints=4, epochs=4)
    run_ranks(1, observed, run, data, tmp_path)
    assert names(tmp_path) == ["000002-000002", "000003", "000003-000001", "000004"]
    assert (tmp_path / "checkpoint" / "000004" / "finished").exists()


def test_a_torn_checkpoint_is_passed_over(run_ranks, data, uninterrupted, tmp_path):
    run = run_config(keep_checkpoints=2)
    run_ranks(1, observed, run, data, tmp_path, "no", 11)
    assert names(tmp_path) == ["000001-000002", "000003-000001"]
    next((tmp_path / "checkpoint" / "000003-000001").glob("*.distcp")).unlink()
    (steps,) = run_ranks(1, observed, run, data, tmp_path, "strict")
    assert steps == uninterrupted[1][5:]
    assert names(tmp_path) == ["000003-000001", "000004"]


def test_the_workflow_trains_a_finished_run_again(run_ranks, data, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[0], tmp_path, dirs_exist_ok=True)
    assert names(tmp_path) == ["000004"]
    (steps,) = run_ranks(1, observed, run_config(), data, tmp_path, "auto", 6)
    assert steps == uninterrupted[1][:6]
    assert names(tmp_path) == ["000001-000002"]


def command(run, data, out, *more):
    """Words of `megagraph train`, its configuration written beside `out`."""
    path = out.with_suffix(".json")
    path.write_text(run.model_dump_json())
    return ["train", str(path), "--data", str(data), "--out", str(out), *more]


def verb(words):
    """Exit code of the command line on this rank."""
    from megagraph.cli import main

    return main(words)


def weights(run, data, out):
    """Names and values of the exported model, and the metadata of the file."""
    from safetensors import safe_open

    from megagraph.train.export import export

    path = out / "model.safetensors"
    export(run, data, out, path)
    with safe_open(path, framework="numpy") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}, handle.metadata()  # noqa: SIM118


def assert_same_weights(first, second):
    assert first.keys() == second.keys()
    assert all(abs(first[name] - second[name]).max() <= 1e-10 for name in first)


@pytest.mark.timeout(600)
def test_a_killed_rank_is_named_and_the_job_goes_on_under_another_layout(run_ranks, data, tmp_path):
    """A real launched job, one rank of which is killed in the middle of an epoch."""
    first, second = run_config({"pp": 2, "layers": [1, 3]}, epochs=8), run_config({"cp": 2, "layers": [4]}, epochs=8)
    out = tmp_path / "killed"
    words = [sys.executable, "-m", "megagraph", "launch", "--nodes", "1", "--tasks", "2", "--"]
    with subprocess.Popen(
        [*words, *command(first, data, out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        kill_rank(job, 1, once=out / "checkpoint" / "000001-000002")
        log = job.communicate(timeout=200)[0]
    assert job.returncode not in (0, 2), log
    assert "megagraph: failed: rank 1 died without a word" in log
    assert not (out / "summary.json").exists()
    assert re.fullmatch(r"0000\d\d-00000[12]", max(name for name in names(out) if name[0] != ".")), "within an epoch"
    assert run_ranks(2, verb, command(second, data, out, "--resume")) == [0, 0]
    single = tmp_path / "single"
    run_ranks(1, observed, run_config(epochs=8), data, single)
    assert_same_weights(weights(second, data, out)[0], weights(run_config(epochs=8), data, single)[0])
    assert max(abs(a - b) for a, b in zip(sum(rows(out), ()), sum(rows(single), ()), strict=True)) <= 1e-10


def kill_rank(job, rank, once):
    """SIGKILL to a rank of a launched job as soon as a path exists."""
    deadline = time.monotonic() + 200
    while not once.exists():
        assert job.poll() is None, job.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks = [child for child in psutil.Process(job.pid).children(recursive=True) if rank_of(child) == str(rank)]
    assert len(ranks) == 1
    ranks[0].kill()


def rank_of(process):
    try:
        return process.environ().get("RANK")
    except psutil.Error:
        return None


def test_export_within_an_epoch(run_ranks, data, stopped, tmp_path):
    """Saved under two stages on four ranks: the weights of one rank after as many steps."""
    run_ranks(1, observed, run_config(), data, tmp_path, "no", 5)
    many, metadata = weights(run_config(UNEVEN), data, stopped)
    assert_same_weights(many, weights(run_config(), data, tmp_path)[0])
    assert (metadata["epochs"], metadata["steps"]) == ("1", "2")


@pytest.mark.parametrize(
    ("change", "word"), [({"peak_lr": 5e-3}, "train.peak_lr"), ({"seed": 1}, "train.seed")], ids=["rate", "seed"]
)
def test_other_settings_are_one_line_and_exit_code_2(data, stopped, tmp_path, change, word):
    out = tmp_path / "other"
    shutil.copytree(stopped / "checkpoint", out / "checkpoint")
    before = read_json(out / "checkpoint" / "000001-000002" / "progress.json")
    code, log = child(command(run_config(**change), data, out, "--resume"))
    (line,) = [line for line in log.splitlines() if "megagraph: error" in line]
    assert code == 2
    assert word in line and "000001-000002" in line and "another folder" in line
    assert read_json(out / "checkpoint" / "000001-000002" / "progress.json") == before
    assert not (out / "summary.json").exists()


def test_auto_starts_afresh_with_one_line_where_settings_differ(data, stopped, tmp_path):
    out = tmp_path / "other"
    shutil.copytree(stopped / "checkpoint", out / "checkpoint")
    code, log = child(command(run_config(peak_lr=5e-3, epochs=1, checkpoint_every=1), data, out, "--resume", "auto"))
    assert code == 0
    (line,) = [line for line in log.splitlines() if "starts afresh" in line]
    assert "train.peak_lr" in line and "train.epochs" in line
    assert len(rows(out)) == 1
    assert names(out) == ["000001"]


def child(words):
    """Exit code and words of one rank of the command line, in a process of its own."""
    context = multiprocessing.get_context("fork")
    reader, writer = os.pipe()
    process = context.Process(target=speaking, args=(words, writer))
    process.start()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        log = pipe.read()
    process.join(60)
    return process.exitcode, log


def speaking(words, writer):
    import logging

    import torch

    from megagraph.cli import main

    torch.set_num_threads(1)
    os.dup2(writer, 2)
    sys.stderr = os.fdopen(writer, "w", buffering=1)
    logging.getLogger().handlers.clear()
    sys.exit(main(words))
