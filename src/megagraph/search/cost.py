"""Times from a fitted `CostModel`: parts of a model, messages, one cell of the grid.

Legend: m sequences of one micro-batch, S local and N all tokens, M bias channels, H heads, d hidden, f FFN,
F features, C classes, R read-out tokens, e bytes per element, n layers of a stage; seconds and bytes throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megagraph.artifacts import CostModel, Workload
from megagraph.config import ParallelPlan, UserError
from megagraph.search.depth import Depth
from megagraph.search.memory import Stage, batch_split, distinct_rows, last_rows, num_parameters, peak_bytes

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


def part_laws(cost: CostModel, workload: Workload, cp: int) -> dict[str, tuple[float, float]]:
    """Fixed seconds and seconds per sequence by `PARTS` on one rank, as profiled for this cp; the slope rescaled by
    relative work where the workload has another shape than the profiled one."""
    fitted = cost.compute.get(str(cp))
    if fitted is None:
        known = ", ".join(map(str, profiled_degrees(cost)))
        raise UserError(f"cp={cp} was not profiled (profiled: {known}): profile with a world_size that cp divides")
    laws = {}
    for part in PARTS:
        kind, direction = part.split("_")
        ratio = _work(cost, workload, cp, kind, direction) / _work(cost, cost.workload, cp, kind, direction)
        laws[part] = (fitted[f"{part}_fixed"], fitted[f"{part}_slope"] * ratio)
    return laws


def profiled_degrees(cost: CostModel) -> list[int]:
    """The cp degrees that have times."""
    return sorted(int(key) for key in cost.compute if key.isdigit())


def part_seconds(cost: CostModel, workload: Workload, cp: int, sequences: float) -> dict[str, float]:
    """Seconds by `PARTS` for one micro-batch of `sequences` on one rank; see `part_laws`."""
    return {part: fixed + slope * sequences for part, (fixed, slope) in part_laws(cost, workload, cp).items()}


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


def p2p_seconds(cost: CostModel, size: float) -> float:
    """One message between neighbouring stages, one way."""
    if "p2p" not in cost.comm:
        raise UserError("no p2p time was profiled, so pp > 1 has no price: profile with two or more ranks")
    return float(_interpolate(cost.comm["p2p"], size))


def all_reduce_seconds(cost: CostModel, ranks: int, size: ArrayLike) -> Array:
    """Sum of `size` bytes [...] over `ranks`; a group size never measured is scaled by (G-1)/G from the nearest one."""
    if ranks == 1:
        return np.zeros(np.shape(size))
    known = sorted(int(key.partition("/")[2]) for key in cost.comm if key.startswith("all_reduce/"))
    if not known:
        raise UserError(f"no all_reduce time was profiled, so {ranks} replicas have no price: profile with more ranks")
    near = min(known, key=lambda group: (abs(group - ranks), group))
    scale = ((ranks - 1) / ranks) / ((near - 1) / near)
    return scale * _interpolate(cost.comm[f"all_reduce/{near}"], size)


def _interpolate(knots: tuple[tuple[float, float], ...], size: ArrayLike) -> Array:
    """Piecewise linear and monotone in bytes; beyond the last knot at that knot's average rate."""
    sizes, seconds = (np.array(column) for column in zip(*knots, strict=True))
    wanted = np.asarray(size, dtype=np.float64)
    within = np.interp(wanted, sizes, seconds)
    return np.asarray(np.where(wanted <= sizes[-1], within, seconds[-1] * wanted / sizes[-1]))


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
