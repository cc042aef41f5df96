"""Starting ranks: argument vectors and rank variables as pure functions, then two real ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from megagraph import launch
from megagraph.cli import main
from megagraph.config import UserError

VERB = ["train", "run.json", "--data", "d", "--out", "o"]
STEP = {
    "SLURM_JOB_ID": "20041",
    "SLURM_STEP_NODELIST": "n[03-04]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}


def test_torchrun_elsewhere():
    argv = launch.command(1, 2, VERB, how="torchrun", error_dir=Path("e"))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0"]
    assert argv == [sys.executable, *start, "-m", "megagraph", "--error-dir", "e", *VERB]


def test_srun_has_one_task_per_rank():
    argv = launch.command(2, 4, VERB, how="srun", error_dir=Path("e"))
    assert argv[:6] == ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "--label"]
    assert argv[6:] == [sys.executable, "-m", "megagraph", "--error-dir", "e", *VERB]


@pytest.mark.parametrize(
    ("nodes", "tasks", "how", "words"),
    [(2, 3, "srun", "--tasks 3 does not divide over --nodes 2"), (2, 2, "torchrun", "--nodes 2 outside SLURM")],
)
def test_impossible_shapes(nodes, tasks, how, words):
    with pytest.raises(UserError, match=words):
        launch.command(nodes, tasks, VERB, how=how, error_dir=Path("e"))


def test_srun_only_inside_a_job_that_has_it(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    assert launch.choose({"SLURM_JOB_ID": "1", "PATH": str(tmp_path)}) == "srun"
    assert launch.choose({"PATH": str(tmp_path)}) == "torchrun"
    assert launch.choose({"SLURM_JOB_ID": "1", "PATH": str(tmp_path / "none")}) == "torchrun"


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3,7],x2", "n1"),
        ("n[01-03]", "n01"),
        ("n[7]", "n7"),
        ("a1,n[2-3]", "a1"),
        ("gpu[2,4]-ib", "gpu2-ib"),
    ],
)
def test_first_host(nodelist, first):
    assert launch.first_host(nodelist) == first


def test_rank_variables_from_slurm():
    assert launch.rank_variables(STEP, lambda host: host == "n03") == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "n03",
        "MASTER_PORT": "20041",
    }


def test_unknown_node_names_fall_back_to_the_address():
    assert launch.rank_variables(STEP, lambda host: False)["MASTER_ADDR"] == "10.0.0.7"


def test_torchrun_variables_win():
    assert launch.rank_variables(STEP | {"RANK": "0"}, lambda host: True) == {}
    assert launch.rank_variables({}, lambda host: True) == {}


def test_one_task_runs_in_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.subprocess, "Popen", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    out = tmp_path / "schema.json"
    assert main(["launch", "--nodes", "1", "--tasks", "1", "--", "schema", "--out", str(out)]) == 0
    assert out.exists()
    assert launch.os.environ["OMP_NUM_THREADS"] == "1"


def test_launch_without_a_verb(capsys):
    assert main(["launch", "--nodes", "1", "--tasks", "2", "--"]) == 2
    assert "launch has no verb" in capsys.readouterr().err


def launched(monkeypatch, tmp_path, script):
    """`launch` with a plain interpreter in the place of torchrun; the script sees the error folder in sys.argv[1]."""
    monkeypatch.setattr(
        launch,
        "command",
        lambda nodes, tasks, verb, *, how, error_dir: [sys.executable, "-c", script, str(error_dir)],
    )
    return launch.launch(1, 2, VERB)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(1)", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import os; assert os.environ['OMP_NUM_THREADS'] == '1'", 0),
    ],
)
def test_exit_codes_propagate(monkeypatch, tmp_path, script, code):
    assert launched(monkeypatch, tmp_path, script) == code


def test_a_ranks_line_becomes_the_error(monkeypatch, tmp_path):
    script = "import sys, pathlib; pathlib.Path(sys.argv[1], '7.txt').write_text('value, rule, remedy'); sys.exit(1)"
    with pytest.raises(UserError, match="value, rule, remedy"):
        launched(monkeypatch, tmp_path, script)


def test_sigterm_reaches_the_child(monkeypatch, tmp_path):
    script = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(5))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)"
    )
    assert launched(monkeypatch, tmp_path, script) == 5


@pytest.mark.distributed
def test_two_real_ranks_end_with_one_line_and_code_2(tmp_path):
    """Each rank fails on the missing file; torchrun exits with 1, launch with 2, its line last."""
    argv = [sys.executable, "-m", "megagraph", "launch", "--nodes", "1", "--tasks", "2", "--"]
    verb = ["coarsen", "none.safetensors", "none.json", "--out", "o.safetensors"]
    done = subprocess.run([*argv, *verb], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("megagraph: error: none.safetensors: no such file")
    assert done.stderr.count("megagraph: error:") == 1
    assert list(tmp_path.iterdir()) == []
