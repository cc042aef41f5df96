"""Seconds of pipeline stages by role and number of layers, and of a whole plan.

Legend: P stages, L layers of the model, n of a stage, q of them recomputed, K micro-batches; role as in `role_index`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megagraph.artifacts import CostModel, Workload
from megagraph.config import ParallelPlan
from megagraph.search.cost import (
    UPDATE_TERMS,
    all_reduce_seconds,
    check_degrees,
    last_layer_factor,
    p2p_seconds,
    part_laws,
)
from megagraph.search.depth import Depth
from megagraph.search.makespan import makespan
from megagraph.search.memory import batch_split, num_parameters, peak_bytes, stage_of, table_parameters

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

NUM_ROLES = 4
FIRST, LAST = np.array([[False], [True], [False], [True]]), np.array([[False], [False], [True], [True]])


def role_index(first: bool, last: bool) -> int:
    """0 inner, 1 first, 2 last, 3 both."""
    return int(first) + 2 * int(last)


@dataclass(frozen=True)
class StageCosts:
    """Seconds of stages with 1 .. L layers by role, for one (pp, cp, dp, K) of a workload: the table a search reads.

    forward, backward (one micro-batch), optimiser, reduce: [4, L + 1] by role and layers; entry 0 is infinite. layer:
    [L + 1] forward of one layer in a stage of n. spared: part of it that the last layer of the model saves. link:
    seconds of one boundary transfer.
    """

    forward: Array
    backward: Array
    optimiser: Array
    reduce: Array
    layer: Array
    spared: float
    link: float

    def backward_with(self, roles: Counts, layers: Counts, recompute: Counts) -> Array:
        """Backward of stages that run the forward of their first q layers again; shapes broadcast."""
        ends = (roles >= role_index(False, True)) & (recompute == layers)
        return np.asarray(self.backward[roles, layers] + self.layer[layers] * (recompute - self.spared * ends))

    @property
    def update(self) -> Array:
        """What follows the last backward [4, L + 1]: all-reduce over cp x dp, then the optimiser."""
        return self.optimiser + self.reduce


def stage_costs(cost: CostModel, workload: Workload, pp: int, cp: int, dp: int, microbatches: int) -> StageCosts:
    """Tables of seconds by role and layers for a (pp, cp, dp, K); `UserError` for what was never profiled."""
    micro, _ = batch_split(workload.batch, dp, microbatches)
    forward, backward, layer, spared = compute_tables(cost, workload, cp, np.array([micro]))
    optimiser, reduce = update_tables(cost, workload, cp * dp)
    link = link_seconds(cost, workload, cp, micro) if pp > 1 else 0.0
    return StageCosts(forward[0], backward[0], optimiser, reduce, layer[0], spared, link)


def link_seconds(cost: CostModel, w: Workload, cp: int, micro: int) -> float:
    """One activation between neighbouring stages: micro S d elements of what layers compute."""
    local = -(-w.num_regular // cp) + w.num_super
    return p2p_seconds(cost, micro * local * w.hidden * w.activation_bytes)


def compute_tables(cost: CostModel, w: Workload, cp: int, micro: Counts) -> tuple[Array, Array, Array, float]:
    """Forward and backward [Q, 4, L + 1], `layer` [Q, L + 1] and `spared` of `StageCosts`, for Q sizes of a
    micro-batch."""
    size = micro[:, None, None]
    part = {name: fixed + slope * size for name, (fixed, slope) in part_laws(cost, w, cp).items()}
    counts = np.arange(1, w.layers + 1)
    depth = Depth.read(cost.depth).effective(counts)
    ending = np.where(LAST, last_layer_factor(w, cp, counts), 1.0)
    tables = np.full((2, len(micro), NUM_ROLES, w.layers + 1), np.inf)
    for row, direction in enumerate(("forward", "backward")):
        ends = FIRST * part[f"embed_{direction}"] + LAST * part[f"head_{direction}"]
        tables[row, ..., 1:] = depth * part[f"layer_{direction}"] * ending + ends
    layer = np.zeros((len(micro), w.layers + 1))
    layer[:, 1:] = (depth * part["layer_forward"] / counts)[:, 0]
    return tables[0], tables[1], layer, 1.0 - float(last_layer_factor(w, cp, 1))


def update_tables(cost: CostModel, w: Workload, ranks: int) -> tuple[Array, Array]:
    """Optimiser and gradient all-reduce over `ranks` = cp x dp, [4, L + 1]."""
    counts = np.arange(1, w.layers + 1)
    size = np.asarray(num_parameters(w, first=FIRST, last=LAST, layers=counts, replicas=ranks), dtype=np.float64)
    # Rows of a sharded table travel within the embedding's passes, which are timed with them.
    travels = FIRST * float(table_parameters(w, ranks) if w.node_table == "sharded" else 0)
    fixed, layer, parameter = (cost.compute.get("update", {}).get(term, 0.0) for term in UPDATE_TERMS)
    tables = np.full((2, NUM_ROLES, w.layers + 1), np.inf)
    tables[0, :, 1:] = fixed + layer * counts + parameter * size
    tables[1, :, 1:] = all_reduce_seconds(cost, ranks, w.element_bytes * (size - travels))
    return tables[0], tables[1]


def predict_memory(cost: CostModel, workload: Workload, plan: ParallelPlan, stage: int) -> float:
    """Peak bytes of one rank of stage `stage` of a plan. Any workload shape; see `outside` for validity."""
    plan.check(workload.layers)
    check_degrees(workload, plan.pp, plan.cp)
    return peak_bytes(cost.memory, stage_of(workload, plan, stage))


def predict_step(cost: CostModel, workload: Workload, plan: ParallelPlan) -> float:
    """Seconds of one training step of a plan (paper, Eq. 10, made exact): micro-batches of equal padded size under the
    plan's schedule, then all-reduce over cp x dp and the optimiser. Raises `UserError` for a cp degree or group never
    profiled."""
    plan.check(workload.layers)
    check_degrees(workload, plan.pp, plan.cp)
    table = stage_costs(cost, workload, plan.pp, plan.cp, plan.dp, plan.microbatches)
    layers = np.array(plan.layers)
    recompute = np.array(plan.recompute or (0,) * plan.pp)
    roles = stage_roles(plan.pp)
    return float(
        makespan(
            plan.schedule,
            table.forward[roles, layers],
            table.backward_with(roles, layers, recompute),
            table.update[roles, layers],
            microbatches=plan.microbatches,
            link=table.link,
        )
    )


def stage_roles(pp: int) -> Counts:
    """Role of each stage of a pipeline."""
    return np.array([role_index(stage == 0, stage == pp - 1) for stage in range(pp)])
