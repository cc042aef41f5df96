"""Length of one step with unequal stages: GPipe by a closed form, 1F1B by simulation; both exact for identical
micro-batches whose messages overlap with compute.

Legend: P stages, the last axis of every array; K micro-batches; seconds throughout.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Seconds = NDArray[np.float64]
Schedule = Literal["gpipe", "1f1b"]
Event = tuple[int, bool, int]
"""Stage, whether forward, micro-batch."""


def makespan(
    schedule: Schedule,
    forward: ArrayLike,
    backward: ArrayLike,
    update: ArrayLike,
    *,
    microbatches: int,
    link: float,
) -> Seconds:
    """Seconds [...] of a step under a schedule; see `gpipe_makespan` and `one_f_one_b_makespan`."""
    run = gpipe_makespan if schedule == "gpipe" else one_f_one_b_makespan
    return run(forward, backward, update, microbatches=microbatches, link_forward=link, link_backward=link)


def gpipe_makespan(
    forward: ArrayLike,
    backward: ArrayLike,
    update: ArrayLike,
    *,
    microbatches: int,
    link_forward: float = 0.0,
    link_backward: float = 0.0,
) -> Seconds:
    """Seconds from the first forward to the last weight update, for any number of pipelines at once.

    forward, backward: seconds [..., P] of one micro-batch on each stage. update: seconds [..., P] that a stage needs
    after its last backward (gradient all-reduce and optimiser). link_*: seconds of one boundary transfer, overlapping
    with compute. Forward is a flow shop of identical jobs; the last stage turns round when all K have arrived, and no
    stage is then still busy, so backward is the mirrored flow shop. The largest f and the largest b enter separately
    (paper, Eq. 10, adds them and under-estimates pipelines whose slowest stages differ by direction).
    """
    f, b, a = (np.asarray(part, dtype=np.float64) for part in (forward, backward, update))
    num_stages = f.shape[-1]
    repeats = microbatches - 1
    slowest = f.max(axis=-1)
    if num_stages > 1:
        slowest = np.maximum(slowest, link_forward)
    turn = f.sum(axis=-1) + (num_stages - 1) * link_forward + repeats * slowest
    path = np.zeros_like(turn)
    slowest = np.zeros_like(turn)
    end = np.zeros_like(turn)
    for stage in reversed(range(num_stages)):
        link = link_backward if stage < num_stages - 1 else 0.0
        path = path + b[..., stage] + link
        slowest = np.maximum(slowest, np.maximum(b[..., stage], link))
        end = np.maximum(end, path + repeats * slowest + a[..., stage])
    return np.asarray(turn + end)


def one_f_one_b_makespan(
    forward: ArrayLike,
    backward: ArrayLike,
    update: ArrayLike,
    *,
    microbatches: int,
    link_forward: float = 0.0,
    link_backward: float = 0.0,
) -> Seconds:
    """As `gpipe_makespan`, under 1F1B: stage s runs min(K, P - s) forwards, then a backward and a forward in turn.

    There is no closed form, because a round trip may be longer than the window of micro-batches under way. But the
    order of events on a stage is fixed, so all pipelines are simulated together: an event begins when its input has
    arrived and its stage is free. Messages of a boundary and direction follow each other.
    """
    f, b, a = (np.asarray(part, dtype=np.float64) for part in (forward, backward, update))
    num_stages = f.shape[-1]
    # Events run one after the other in Python; floats are ten times faster than arrays of one.
    single = f.size == num_stages
    larger: Any = max if single else np.maximum
    columns = [[part.reshape(-1)[s].item() if single else part[..., s] for s in range(num_stages)] for part in (f, b)]
    free: list[Any] = [0.0] * num_stages
    sent: dict[tuple[int, bool], Any] = {}
    arrived: dict[Event, Any] = {}
    for stage, ahead, number in one_f_one_b_order(num_stages, microbatches):
        ready = arrived.pop((stage, ahead, number), 0.0)
        done = larger(free[stage], ready) + columns[0 if ahead else 1][stage]
        free[stage] = done
        last = stage == num_stages - 1
        if ahead and last:
            arrived[stage, False, number] = done
        elif ahead or stage > 0:
            delay = link_forward if ahead else link_backward
            sent[stage, ahead] = larger(sent.get((stage, ahead), 0.0), done) + delay
            arrived[stage + 1 if ahead else stage - 1, ahead, number] = sent[stage, ahead]
    ends = np.stack([np.broadcast_to(np.asarray(end), f.shape[:-1]) for end in free], axis=-1)
    return np.asarray((ends + a).max(axis=-1))


def warm_up(num_stages: int, stage: int, microbatches: int) -> int:
    """Micro-batches that stage s (from 0) of a 1F1B pipeline runs forward before its first backward, and the most
    whose activations it ever keeps."""
    return min(microbatches, num_stages - stage)


@lru_cache(maxsize=256)
def one_f_one_b_order(num_stages: int, microbatches: int) -> tuple[Event, ...]:
    """All events of a 1F1B step, each after those that it waits for."""
    queues = []
    for stage in range(num_stages):
        ahead = warm_up(num_stages, stage, microbatches)
        own = [(True, k) for k in range(ahead)]
        for k in range(microbatches):
            own.append((False, k))
            own += [(True, ahead + k)] if ahead + k < microbatches else []
        queues.append(own[::-1])
    order: list[Event] = []
    ready = {(0, True, k) for k in range(microbatches)}
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue and (stage, *queue[-1]) in ready:
                ahead_now, k = queue.pop()
                order.append((stage, ahead_now, k))
                if ahead_now and stage == num_stages - 1:
                    ready.add((stage, False, k))
                elif ahead_now or stage > 0:
                    ready.add((stage + 1 if ahead_now else stage - 1, ahead_now, k))
    return tuple(order)
