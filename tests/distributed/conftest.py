"""Several ranks on gloo in one test: forked processes, a file store, one thread each, a time limit."""

import functools
import multiprocessing
import os
import queue
import socket
import time
import traceback

import pytest


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(function, rank, world_size, port, results, arguments):
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    try:
        results.put((rank, None, function(*arguments)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def launch_ranks(context, world_size, function, *arguments, seconds=120):
    """Call `function(*arguments)` on every rank; returns their results in rank order, or fails with a traceback."""
    results = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=_rank_main, args=(function, rank, world_size, port, results, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    collected = {}
    deadline = time.monotonic() + seconds
    try:
        while len(collected) < world_size:
            try:
                rank, error, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(world_size)) - set(collected))
                pytest.fail(f"ranks {missing} gave no result within {seconds} s")
            if error:
                pytest.fail(f"rank {rank}:\n{error}")
            collected[rank] = value
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    return [collected[rank] for rank in range(world_size)]


@pytest.fixture(scope="session")
def run_ranks():
    """`launch_ranks` on forked processes: no interpreter or torch start-up per rank, imports are done once here."""
    import megagraph.profile.profiler
    import megagraph.train.trainer  # noqa: F401

    return functools.partial(launch_ranks, multiprocessing.get_context("fork"))
