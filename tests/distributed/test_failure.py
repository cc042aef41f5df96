"""A dead, a raising and a silent rank each end the job within the timeout, and are named."""

import subprocess
import sys
import time

import pytest

from megagraph.failure import Report, cause, read_reports

pytestmark = pytest.mark.distributed

RANK = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from megagraph.config import ParallelPlan
from megagraph.failure import leaving_word
from megagraph.parallel.mesh import make_mesh, process_group

with leaving_word(Path(sys.argv[1])), process_group(2, "cpu", 5.0):
    mesh = make_mesh(ParallelPlan(dp=2, layers=(1,)), "cpu", 5.0)
    dist.barrier()
    if mesh.rank == 1:
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[2] == "raises":
            raise ArithmeticError("no such number")
        while True:  # silent
            time.sleep(0.1)
    dist.all_reduce(torch.zeros(1), group=mesh.group("dp"))
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("killed", "rank 1 died without a word"),
        ("raises", "rank 1 raised ArithmeticError: no such number"),
        ("silent", "rank 1 was silent"),
    ],
)
def test_the_failing_rank_is_named(tmp_path, how, expected):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    reports = tmp_path / "reports"
    reports.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    begin = time.monotonic()
    done = subprocess.run([*torchrun, str(script), str(reports), how], capture_output=True, timeout=120, check=False)
    assert done.returncode != 0
    assert time.monotonic() - begin < 100
    found = read_reports(reports, 2)
    assert cause(found).startswith(expected), found
    if how == "raises":
        assert "Traceback" in found[1].raised
    if how == "silent":
        assert "rank.py" in cause(found)


def test_a_rank_that_only_waited_is_not_the_cause():
    waited = Report(0, raised="Traceback\nRuntimeError: Connection closed by peer [127.0.0.1]:1")
    assert cause([waited, Report(1, raised="Traceback\nValueError: bad")]) == "rank 1 raised ValueError: bad"
    assert cause([waited, Report(1)]).startswith("rank 1 died")
    assert cause([Report(0, stopped="x"), Report(1, stopped="x")]) == "all ranks were stopped from outside"
