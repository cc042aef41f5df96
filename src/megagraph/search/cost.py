"""Predictions from a fitted `CostModel`: bytes of a stage, seconds of a step, one cell of the grid.

Legend: m sequences of one micro-batch, S local and N all tokens, M bias channels, H heads, d hidden, f FFN,
F features, C classes, R read-out tokens, e bytes per element, n layers of a stage; seconds and bytes throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph.artifacts import CostModel, Workload
from megagraph.config import ParallelPlan, UserError
from megagraph.search.depth import Depth
from megagraph.search.makespan import gpipe_makespan
from megagraph.search.memory import (
    Stage,
    batch_split,
    distinct_rows,
    last_rows,
    num_parameters,
    peak_bytes,
    stage_of,
    table_parameters,
)

Array = NDArray[np.float64]

PARTS = ("layer_forward", "layer_backward", "embed_forward", "embed_backward", "head_forward", "head_backward")
LAYER_TERMS = ("fixed", "linear", "scores", "softmax", "token")
REST_TERMS = ("rest_fixed", "rest_features", "rest_token")
UPDATE_TERMS = ("fixed", "layer", "parameter")
FLOP_WEIGHTS: dict[str, float] = {"linear": 1.0, "scores": 1.0, "softmax": 80.0, "token": 40.0}
"""Cost in multiply-adds, used to rescale the profiled layer when no grid fitted the real weights: an exponential
costs about 80 of them on one core, an element of the element-wise parts about 40."""

GRID_SIZES = (
    "batch",
    "layers",
    "heads",
    "hidden",
    "ffn",
    "num_regular",
    "num_super",
    "bias_channels",
    "num_features",
    "num_classes",
)


@dataclass(frozen=True)
class Cell:
    """Prediction for one row of the grid: one rank, the whole model, one micro-batch."""

    peak_bytes: float
    forward_seconds: float
    backward_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class StageCosts:
    """Seconds of stages with 1 .. L layers by role, for one (pp, cp, dp, K) of a workload: the table a search reads.

    forward, backward, update: [4, L + 1] by role (see `role_index`) and layers; entry 0 is infinite. link: seconds of
    one boundary transfer.
    """

    forward: Array
    backward: Array
    update: Array
    link: float


def role_index(first: bool, last: bool) -> int:
    """0 inner, 1 first, 2 last, 3 both."""
    return int(first) + 2 * int(last)


def layer_terms(w: Workload, cp: int, sequences: float) -> Array:
    """Work of one layer on one rank by `LAYER_TERMS`: constant, products, scores with bias, exponentials, elements."""
    S, N = -(-w.num_regular // cp) + w.num_super, w.num_tokens
    m, d = sequences, w.hidden
    linear = m * S * (8 * d * d + 4 * d * w.ffn)
    scores = m * S * N * (4 * d + 2 * w.bias_channels * w.heads)
    return np.array([1.0, linear, scores, m * w.heads * S * N, m * S * (d + w.ffn)])


def last_layer_factor(w: Workload, cp: int, layers: NDArray[Any] | float) -> NDArray[Any] | float:
    """Work of n layers that end the model over n full ones: the last computes keys for all tokens, the rest of its
    work for the rows that are read out."""
    S, N, d = -(-w.num_regular // cp) + w.num_super, w.num_tokens, w.hidden
    per_key = 4.0 * d * d
    per_query = 4.0 * d * d + 4 * d * w.ffn + N * (4 * d + 2 * w.bias_channels * w.heads)
    per_query += FLOP_WEIGHTS["softmax"] * w.heads * N + FLOP_WEIGHTS["token"] * (d + w.ffn)
    share = (S * per_key + last_rows(w, cp) * per_query) / (S * (per_key + per_query))
    return 1.0 - (1.0 - share) / layers


def rest_terms(w: Workload, cp: int, sequences: float) -> Array:
    """Work of embedding and head on one rank by `REST_TERMS`."""
    S = -(-w.num_regular // cp) + w.num_super
    tokens = sequences * S
    return np.array([1.0, distinct_rows(w, tokens) * w.num_features * w.hidden, tokens * w.hidden])


def update_terms(w: Workload, *, first: bool, last: bool, layers: int, replicas: int = 1) -> Array:
    """Work of the optimiser by `UPDATE_TERMS`."""
    parameters = num_parameters(w, first=first, last=last, layers=layers, replicas=replicas)
    return np.array([1.0, layers, parameters], dtype=np.float64)


def cell_workload(base: Workload, row: Mapping[str, Any]) -> Workload:
    """The workload of a grid row; read-out, global tokens, element size and attention are those of the profile."""
    try:
        sizes = {field: int(row[field]) for field in GRID_SIZES}
    except KeyError as error:
        raise UserError(f"grid row has no column {error}: make the grid again") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"grid row holds a size that is no whole number ({error}): make the grid again") from None
    if min(size for field, size in sizes.items() if field not in ("num_super", "bias_channels")) < 1:
        raise UserError(f"grid row {sizes} holds a size below 1: make the grid again")
    return base.model_copy(update=sizes)


def whole_model(w: Workload) -> Stage:
    """The single stage of a grid cell: all layers, one rank, one micro-batch."""
    return Stage(w, True, True, w.layers, cp=1, dp=1, microbatches=1, sequences=w.batch)


def predict_memory(cost: CostModel, workload: Workload, plan: ParallelPlan, stage: int) -> float:
    """Peak bytes of one rank of stage `stage` of a plan. Any workload shape; see `outside` for validity."""
    plan.check(workload.layers)
    check_degrees(workload, plan.pp, plan.cp)
    return peak_bytes(cost.memory, stage_of(workload, plan, stage))


def predict_step(cost: CostModel, workload: Workload, plan: ParallelPlan) -> float:
    """Seconds of one training step of a plan (paper, Eq. 10, made exact): micro-batches of equal padded size, GPipe,
    then all-reduce over cp x dp and the optimiser. Raises `UserError` for a cp degree or group never profiled."""
    plan.check(workload.layers)
    check_degrees(workload, plan.pp, plan.cp)
    table = stage_costs(cost, workload, plan.pp, plan.cp, plan.dp, plan.microbatches)
    layers = np.array(plan.layers)
    stages = range(plan.pp)
    roles = np.array([role_index(index == 0, index == plan.pp - 1) for index in stages])
    return float(
        gpipe_makespan(
            table.forward[roles, layers],
            table.backward[roles, layers],
            table.update[roles, layers],
            microbatches=plan.microbatches,
            link_forward=table.link,
            link_backward=table.link,
        )
    )


def check_degrees(workload: Workload, pp: int, cp: int) -> None:
    """Raise `UserError` for degrees that the workload cannot have."""
    if pp > workload.layers:
        raise UserError(f"pp={pp} stages need as many layers but layers={workload.layers}: lower pp")
    if cp > workload.num_regular:
        raise UserError(f"cp={cp} exceeds the {workload.num_regular} regular tokens of a sequence: lower cp")
    if cp > 1 and workload.attention == "dense":
        raise UserError(f"attention=dense cannot be sharded over cp={cp}: use attention: tiled")


def outside(cost: CostModel, workload: Workload, plan: ParallelPlan) -> list[str]:
    """What of a plan lies beyond the fitted range, one `name=value not in lo..hi` each; empty where all is inside."""
    micro, _ = batch_split(workload.batch, plan.dp, plan.microbatches)
    values = dimensions(workload, max(plan.layers), plan.cp, micro)
    ranges = {name: cost.valid[name] for name in values if name in cost.valid}
    return [
        f"{name}={values[name]:g} not in {low:g}..{high:g}"
        for name, (low, high) in ranges.items()
        if not low <= values[name] <= high
    ]


def dimensions(w: Workload, layers: int, cp: int, sequences: int) -> dict[str, float]:
    """The sizes whose fitted range `CostModel.valid` states; `sequences` is those of one micro-batch."""
    sizes = {"layers": layers, "cp": cp, "sequences": sequences, "num_tokens": w.num_tokens}
    return {**sizes, **{name: getattr(w, name) for name in ("heads", "hidden", "ffn", "bias_channels", "num_features")}}


def part_seconds(cost: CostModel, workload: Workload, cp: int, sequences: float) -> dict[str, float]:
    """Seconds by `PARTS` for one micro-batch of `sequences` on one rank: affine in sequences as profiled for this cp,
    the slope rescaled by relative work where the workload has another shape than the profiled one."""
    fitted = cost.compute.get(str(cp))
    if fitted is None:
        known = ", ".join(sorted((key for key in cost.compute if key.isdigit()), key=int))
        raise UserError(f"cp={cp} was not profiled (profiled: {known}): profile with a world_size that cp divides")
    old = cost.workload
    seconds = {}
    for part in PARTS:
        kind, direction = part.split("_")
        ratio = _work(cost, workload, cp, kind, direction) / _work(cost, old, cp, kind, direction)
        seconds[part] = fitted[f"{part}_fixed"] + fitted[f"{part}_slope"] * ratio * sequences
    return seconds


def _work(cost: CostModel, w: Workload, cp: int, kind: str, direction: str) -> float:
    """Relative work per sequence of a layer, the embedding or the head."""
    _, features, token = rest_terms(w, cp, 1.0)
    if kind == "embed":
        return float(features + token)
    if kind == "head":
        return float(token + w.num_readout * w.hidden * w.num_classes)
    weights = cost.compute.get(f"grid_{direction}", FLOP_WEIGHTS)
    names = LAYER_TERMS[1:]
    work = float(layer_terms(w, cp, 1.0)[1:] @ np.array([weights[name] for name in names]))
    # a grid too small to show any slope leaves nothing to scale by
    return work if work > 0 else float(layer_terms(w, cp, 1.0)[1])


def stage_costs(cost: CostModel, workload: Workload, pp: int, cp: int, dp: int, microbatches: int) -> StageCosts:
    """Tables of seconds by role and layers for a (pp, cp, dp, K); `UserError` for what was never profiled."""
    w, num_layers = workload, workload.layers
    micro, _ = batch_split(w.batch, dp, microbatches)
    part = part_seconds(cost, w, cp, micro)
    depth = Depth.read(cost.depth).effective(np.arange(num_layers + 1))
    counts = np.arange(1, num_layers + 1)
    tables = np.full((3, 4, num_layers + 1), np.inf)
    optimiser = np.array([cost.compute.get("update", {}).get(term, 0.0) for term in UPDATE_TERMS])
    for first in (False, True):
        for last in (False, True):
            role = role_index(first, last)
            for row, direction in enumerate(("forward", "backward")):
                ends = first * part[f"embed_{direction}"] + last * part[f"head_{direction}"]
                full = depth[1:] * part[f"layer_{direction}"]
                tables[row, role, 1:] = (full * last_layer_factor(w, cp, counts) if last else full) + ends
            for n in range(1, num_layers + 1):
                terms = update_terms(w, first=first, last=last, layers=n, replicas=cp * dp)
                # Rows of a sharded table travel within the embedding's passes, which are timed with them.
                travels = first and w.node_table == "sharded"
                size = w.element_bytes * (terms[-1] - travels * table_parameters(w, cp * dp))
                tables[2, role, n] = float(terms @ optimiser) + all_reduce_seconds(cost, cp * dp, float(size))
    local = -(-w.num_regular // cp) + w.num_super
    link = p2p_seconds(cost, micro * local * w.hidden * w.activation_bytes) if pp > 1 else 0.0
    return StageCosts(tables[0], tables[1], tables[2], link)


def p2p_seconds(cost: CostModel, size: float) -> float:
    """One message between neighbouring stages, one way."""
    if "p2p" not in cost.comm:
        raise UserError("no p2p time was profiled, so pp > 1 has no price: profile with two or more ranks")
    return _interpolate(cost.comm["p2p"], size)


def all_reduce_seconds(cost: CostModel, ranks: int, size: float) -> float:
    """Sum of `size` bytes over `ranks`; a group size never measured is scaled by (G-1)/G from the nearest one."""
    if ranks == 1:
        return 0.0
    known = sorted(int(key.partition("/")[2]) for key in cost.comm if key.startswith("all_reduce/"))
    if not known:
        raise UserError(f"no all_reduce time was profiled, so {ranks} replicas have no price: profile with more ranks")
    near = min(known, key=lambda group: (abs(group - ranks), group))
    scale = ((ranks - 1) / ranks) / ((near - 1) / near)
    return scale * _interpolate(cost.comm[f"all_reduce/{near}"], size)


def _interpolate(knots: tuple[tuple[float, float], ...], size: float) -> float:
    """Piecewise linear and monotone in bytes; beyond the last knot at that knot's average rate."""
    sizes, seconds = (np.array(column) for column in zip(*knots, strict=True))
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, seconds))
    return float(seconds[-1] * size / sizes[-1])


def predict_cell(cost: CostModel, row: Mapping[str, Any]) -> Cell:
    """What the model expects in one row of a grid file (figures 9a, 9b)."""
    w = cell_workload(cost.workload, row)
    if "grid_forward" not in cost.compute:
        raise UserError("the cost model was fitted without a grid: fit it with the grid files")
    layer, rest = layer_terms(w, 1, w.batch), rest_terms(w, 1, w.batch)
    depth = float(Depth.read(cost.depth).effective(w.layers)) * float(last_layer_factor(w, 1, w.layers))
    seconds = {}
    for direction in ("forward", "backward"):
        fitted = cost.compute[f"grid_{direction}"]
        per_layer = layer @ np.array([fitted[name] for name in LAYER_TERMS])
        seconds[direction] = float(depth * per_layer + rest @ np.array([fitted[name] for name in REST_TERMS]))
    optimiser = np.array([cost.compute["update"][term] for term in UPDATE_TERMS])
    update = float(update_terms(w, first=True, last=True, layers=w.layers) @ optimiser)
    forward, backward = seconds["forward"], seconds["backward"]
    return Cell(peak_bytes(cost.memory, whole_model(w)), forward, backward, forward + backward + update)
