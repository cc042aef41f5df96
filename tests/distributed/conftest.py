"""Several ranks on gloo in one test: forked processes, a file store, one thread each, a time limit."""

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


@pytest.fixture
def run_ranks():
    """Call `function(*arguments)` on every rank; returns their results in rank order, or fails with a traceback."""

    def run(world_size, function, *arguments, seconds=120):
        context = multiprocessing.get_context("fork")
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

    return run
