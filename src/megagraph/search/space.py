"""Which plans there are: cells of degrees, and ways to cut the layers.

A cell is (pp, cp, dp, K, schedule) and, where ranks are unequal, an order of their types along the pipeline.

Legend: P stages, L layers, W ranks, K micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations

import numpy as np
from numpy.typing import NDArray

from megagraph.artifacts import Workload
from megagraph.config import UserError
from megagraph.config_search import SearchConfig
from megagraph.search.makespan import Schedule

Layers = NDArray[np.int64]

CHUNK = 65536


@dataclass(frozen=True)
class Cell:
    """The degrees of a plan without its layer partition."""

    pp: int
    cp: int
    dp: int
    microbatches: int
    schedule: Schedule = "gpipe"
    order: tuple[int, ...] = ()

    @property
    def strategy(self) -> str:
        """Name of the degrees above 1, for example `PP+DP`; `single` if there are none."""
        return strategy_name(self.pp, self.cp, self.dp)


def strategy_name(pp: int, cp: int, dp: int) -> str:
    """`single`, `DP`, `CP`, `PP`, `PP+DP`, `CP+DP`, `PP+CP` or `PP+CP+DP`."""
    return "+".join(name for name, degree in (("PP", pp), ("CP", cp), ("DP", dp)) if degree > 1) or "single"


def num_partitions(num_layers: int, num_stages: int) -> int:
    """C(L-1, P-1): ways to cut L layers into P stages of at least one layer (paper, II-B: 1771 for 24 and 4)."""
    return math.comb(num_layers - 1, num_stages - 1)


def partitions(num_layers: int, num_stages: int) -> Iterator[Layers]:
    """All ways to cut L layers into P stages, lazily, as arrays [at most CHUNK, P]."""
    cuts = combinations(range(1, num_layers), num_stages - 1)
    while chunk := list(islice(cuts, CHUNK)):
        inner = np.array(chunk, dtype=np.int64).reshape(len(chunk), num_stages - 1)
        yield np.diff(inner, axis=1, prepend=0, append=num_layers)


def random_cuts(num_layers: int, num_stages: int, count: int, seed: int = 0) -> Layers:
    """Some of the ways to cut, each as likely: [count, P]; the same for the same arguments."""
    generator = np.random.default_rng(seed)
    inner = generator.random((count, num_layers - 1)).argsort(axis=1)[:, : num_stages - 1] + 1
    return np.asarray(np.diff(np.sort(inner, axis=1), axis=1, prepend=0, append=num_layers), dtype=np.int64)


def list_cells(
    workload: Workload,
    world_size: int,
    microbatches: Sequence[int],
    degrees: Sequence[int] | None = None,
    config: SearchConfig | None = None,
) -> list[Cell]:
    """Every cell of W ranks that the workload allows: pp <= L; cp <= N', among `degrees` (None: any; those that were
    profiled), 1 for dense attention and a divisor of H for `all_to_all`; dp <= batch; K <= sequences of a replica,
    and 1F1B with K of 2 and of pp or more. `UserError` where there is none."""
    if world_size < 1 or not microbatches or min(microbatches) < 1:
        raise UserError(
            f"world_size={world_size}, microbatches={list(microbatches)}: both need whole numbers of 1 or more"
        )
    w, chosen = workload, config or SearchConfig(schedules=("gpipe",))
    weak = chosen.batch_mode == "weak"
    orders = list(permutations(range(len(chosen.devices))))
    # with one micro-batch the two schedules are the same
    fewest = 2 if "gpipe" in chosen.schedules else 1
    cells = []
    for pp in (p for p in range(1, min(world_size, w.layers) + 1) if world_size % p == 0):
        rest = world_size // pp
        for cp in (c for c in range(1, rest + 1) if rest % c == 0 and _allowed(w, c, degrees)):
            dp = rest // cp
            if dp > w.batch and not weak:
                continue
            replica = w.batch if weak else -(-w.batch // dp)
            cells += [
                Cell(pp, cp, dp, k, schedule, order)
                for k in sorted(set(microbatches))
                for schedule in chosen.schedules
                for order in (orders if pp > 1 else orders[:1])
                if k <= replica and (schedule == "gpipe" or k >= max(pp, fewest))
            ]
    if not cells:
        raise UserError(
            f"no layout of world_size={world_size} exists for layers={w.layers}, N'={w.num_regular}, batch={w.batch}, "
            f"attention={w.attention}, microbatches={list(microbatches)}, profiled cp={_listed(degrees)}: "
            "use fewer ranks, a larger batch or more microbatches"
        )
    return cells


def _allowed(w: Workload, cp: int, degrees: Sequence[int] | None) -> bool:
    """Whether attention can be sharded over cp ranks, and whether anybody knows what that costs."""
    if cp == 1:
        return degrees is None or 1 in degrees
    if w.attention == "dense" or cp > w.num_regular or (w.attention == "all_to_all" and w.heads % cp):
        return False
    return degrees is None or cp in degrees


def _listed(degrees: Sequence[int] | None) -> str:
    return "any" if degrees is None else ",".join(map(str, degrees))
