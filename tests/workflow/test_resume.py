"""A train job that was killed goes on when the workflow runs again, and only then."""

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.workflow, pytest.mark.timeout(900)]

CONFIG = {
    "title": "A small planted graph",
    "datasets": {"small": {"source": "planted", "nodes": 120, "communities": 3, "features": 8}},
    "coarsenings": {"default": {"ratio": 0.1}},
    "defaults": {"dataset": "small"},
    "runs": {
        "small": {
            "model": {"layers": 2, "heads": 2, "hidden": 8, "ffn": 8, "bias_channels": 2},
            "sampling": {"num_sampled": 4, "samples": 2},
            "train": {"batch": 30, "epochs": 15, "eval_every": 5, "checkpoint_every": 100, "checkpoint_steps": 4},
            "parallel": {"plan": {"layers": [2]}},
        }
    },
}
TARGET = "results/train/small/summary.json"


def test_a_killed_job_goes_on_and_a_changed_one_starts_afresh(workflow, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    run = workflow.folder / "results" / "train" / "small"
    log = workflow.folder / "logs" / "train" / "small.log"
    words = [sys.executable, "-m", "snakemake", "--directory", str(workflow.folder), "--configfile", str(config)]
    with subprocess.Popen(
        [*words, "--cores", "1", TARGET], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as first:
        kill_train(first, once=run / "checkpoint" / "000001-000001")
        text = first.communicate(timeout=250)[0]
    assert first.returncode == 1, text
    assert not (workflow.folder / TARGET).exists()
    again = workflow("--cores", "1", TARGET, config=config)
    assert again.returncode == 0, again.stderr
    (position,) = re.findall(r"small: goes on from \S*/checkpoint/(\S+)", log.read_text())
    assert position >= "000001-000001"
    assert "epoch 1/15" not in log.read_text() and "epoch 15/15" in log.read_text()
    config.write_text(config.read_text().replace("epochs: 15", "epochs: 2"))
    changed = workflow("--cores", "1", TARGET, config=config)
    assert changed.returncode == 0, changed.stderr
    assert re.search(r"small: starts afresh: .* has finished", log.read_text())
    assert "epoch 1/2" in log.read_text()
    assert [path.name for path in (run / "checkpoint").iterdir()] == ["000002"]


def kill_train(snakemake, once):
    """SIGKILL to the training process of a running Snakemake as soon as a path exists."""
    deadline = time.monotonic() + 200
    while not once.exists():
        assert snakemake.poll() is None, snakemake.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(snakemake.pid).children(recursive=True)
    (train,) = [child for child in children if child.cmdline()[1:4] == ["-m", "megagraph", "launch"]]
    train.kill()
