"""How a verb starts N ranks: `srun` inside a SLURM job, `torchrun` elsewhere, this very process for one rank.

The argument vectors and the mapping from SLURM's variables to torch's are pure functions; `launch` alone starts
anything. A rank that stops on a `UserError` leaves its one line in `--error-dir`, because torchrun turns every
exit code of a rank into 1: with such a line `launch` prints it last and exits with 2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal

from megagraph.config import UserError
from megagraph.failure import Report, cause, read_reports

Launcher = Literal["srun", "torchrun"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # ranks share the cores of a node; a thread pool in each would fight the others


def choose(environment: Mapping[str, str]) -> Launcher:
    """`srun` if this is a SLURM job and `srun` is on its PATH, else `torchrun`."""
    inside = bool(environment.get("SLURM_JOB_ID")) and shutil.which("srun", path=environment.get("PATH"))
    return "srun" if inside else "torchrun"


def command(nodes: int, tasks: int, verb: Sequence[str], *, how: Launcher, error_dir: Path) -> list[str]:
    """The argument vector that starts `tasks` ranks of ``megagraph VERB ...`` on `nodes` nodes.

    Under `srun` every rank is one task, so that rank order is node order (stage 0 and the ring neighbours are placed
    by rank). Raises `UserError` if the ranks do not divide over the nodes, or for several nodes outside SLURM.
    """
    if tasks % nodes:
        raise UserError(f"--tasks {tasks} does not divide over --nodes {nodes}: change one of them")
    megagraph = ["-m", "megagraph", "--error-dir", str(error_dir), *verb]
    if how == "srun":
        shape = [f"--nodes={nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={tasks // nodes}"]
        return ["srun", *shape, "--kill-on-bad-exit=1", "--label", sys.executable, *megagraph]
    if nodes > 1:
        raise UserError(f"--nodes {nodes} outside SLURM: use --nodes 1, or submit with a SLURM profile")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tasks), "--max-restarts", "0"]
    return [sys.executable, *torchrun, *megagraph]


def first_host(nodelist: str) -> str:
    """First name of a SLURM node list: ``n[01-03,7],x2`` gives ``n01``."""
    prefix, bracket, rest = nodelist.partition("[")
    if not bracket or "," in prefix:
        return prefix.split(",")[0]
    inside, _, after = rest.partition("]")
    return prefix + inside.split(",")[0].split("-")[0] + after.split(",")[0]


def rank_variables(environment: Mapping[str, str], resolves: Callable[[str], bool]) -> dict[str, str]:
    """Torch's rank variables for one task of `srun`; empty where torchrun has set them or there is no SLURM step.

    `resolves` tells whether a node name is known here; if not, the address that `srun` was started from is used
    (the shell of a multi-task job runs on the first node).
    """
    if "RANK" in environment or "SLURM_STEP_NODELIST" not in environment:
        return {}
    host = first_host(environment["SLURM_STEP_NODELIST"])
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "MASTER_ADDR": host if resolves(host) else environment["SLURM_LAUNCH_NODE_IPADDR"],
        "MASTER_PORT": str(20000 + int(environment["SLURM_JOB_ID"]) % 20000),
    }


def become_rank() -> None:
    """In a rank that `launch` started: give torch its variables, whoever the launcher is."""
    os.environ.update(rank_variables(os.environ, _resolves))


def become_only_rank() -> None:
    """This process is the single rank: the same one thread that each of several ranks gets."""
    os.environ.update(ONE_THREAD)


def report_error(error_dir: Path, line: str) -> None:
    """In a rank: leave the one line for `launch`."""
    (error_dir / f"{os.getpid()}.txt").write_text(line + "\n")


def launch(nodes: int, tasks: int, verb: Sequence[str]) -> int:
    """Start the ranks, wait, return the exit code: 0, 2 for a mistake in the input, else the launcher's own.

    An interrupt or SIGTERM is passed on, so that no rank outlives the launcher.
    """
    how = choose(os.environ)
    shared = Path.cwd() if how == "srun" else None  # other nodes see the working directory, not this node's /tmp
    with tempfile.TemporaryDirectory(prefix=".megagraph-errors-", dir=shared) as name:
        arguments = command(nodes, tasks, verb, how=how, error_dir=Path(name))
        code = _run(arguments, {**os.environ, **ONE_THREAD})
        lines = sorted({path.read_text().strip() for path in Path(name).glob("*.txt")})
        reports = read_reports(Path(name), tasks)
    if code and lines:
        raise UserError(lines[0])
    if code:
        tell(reports)
    return code


def tell(reports: Sequence[Report]) -> None:
    """Print what each rank left, the cause last."""
    for report in reports:
        if word := (report.raised or report.stopped).strip():
            sys.stderr.write(f"rank {report.rank} {'raised' if report.raised else 'was stopped'}:\n{word}\n")
    sys.stderr.write(f"megagraph: failed: {cause(list(reports))}\n")


def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Exit code of the child; SIGTERM is forwarded, SIGINT reaches it through the process group."""
    with subprocess.Popen(arguments, env=environment) as child:

        def forward(number: int, frame: FrameType | None) -> None:
            child.send_signal(number)

        before = signal.signal(signal.SIGTERM, forward)
        try:
            code = child.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    return 128 - code if code < 0 else code


def _resolves(host: str) -> bool:
    import socket

    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
