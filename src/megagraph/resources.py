"""What a run needs of a machine: pure functions of the configuration, used by the workflow's resources.

They depend on nothing else (SLURM's jobs evaluate them again inside the job). Memory is in MB as Snakemake counts it
(1e6 bytes), per node; run time in minutes.
"""

from __future__ import annotations

import math
import subprocess

from megagraph.config import RunConfig, UserError

PROCESS_MB = 2000  # interpreter, torch, graph; also covers the two nested Snakemakes of a SLURM job
GPU_HOST_MB = 8000  # host memory per rank beside a GPU, whose own memory SLURM does not count


def tasks(run: RunConfig) -> int:
    """Ranks of the run."""
    return run.parallel.world_size


def nodes(run: RunConfig) -> int:
    """Nodes of the run."""
    return run.parallel.nodes


def mpi(run: RunConfig) -> str:
    """`srun` for several ranks; the SLURM plugin refuses it for one."""
    return "srun" if tasks(run) > 1 else ""


def gres(run: RunConfig, ranks: int | None = None) -> str:
    """GPUs per node in SLURM's words, one per rank; empty on CPU. `ranks` overrides the run's number (on one node)."""
    if run.device != "cuda":
        return ""
    return f"gpu:{ranks if ranks is not None else tasks(run) // nodes(run)}"


def mem_mb(run: RunConfig, ranks: int | None = None) -> int:
    """Memory per node: each rank's process, and its tensors where they are on the host."""
    tensors = math.ceil(run.parallel.memory_limit_gb * 1000) if run.device == "cpu" else GPU_HOST_MB
    return (ranks if ranks is not None else tasks(run) // nodes(run)) * (PROCESS_MB + tensors)


def runtime(minutes: int, attempt: int) -> int:
    """Time limit: it grows with every retry that a profile allows."""
    return minutes * attempt


def gpu_memories() -> list[float]:
    """Memory of each visible GPU in GB (1e9 bytes), from the driver's own tool; empty where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [float(line) * 2**20 / 1e9 for line in done.stdout.splitlines() if line.strip()]


def check_gpus(needed: int, needed_gb: float, found: list[float]) -> None:
    """Raise `UserError` unless `needed` GPUs of at least `needed_gb` are among those found."""
    large = [size for size in found if size >= needed_gb]
    if len(large) >= needed:
        return
    size = f" with at least {needed_gb:g} GB" if needed_gb else ""
    here = f"{len(found)} found ({', '.join(f'{each:.0f} GB' for each in found)})" if found else "none found"
    raise UserError(
        f"this config needs {needed} GPU{'s' * (needed > 1)}{size}, {here}: run it where they are, "
        "or a config that fits here: --configfile config/demo.yaml"
    )
