"""Peak bytes of one rank of a pipeline stage: a closed form whose few coefficients are fitted.

A step has four moments that can be the peak: the start of the first backward, the start of a later one (gradients
exist), a layer whose forward runs again, and the weight update. Each is linear in the same coefficients, which count
live copies of a physical quantity, so each has an expected value (`PRIOR`); a fit that strays from it says something.

Legend: B sequences per replica, m = B/K of one micro-batch, S local and N all tokens, M bias channels, H heads,
d hidden, f FFN, F features, C classes, g global tokens, R read-out tokens, n layers of the stage, q of them recomputed,
w micro-batches whose activations are kept at once; e bytes per element, a of what layers compute (less than e under
autocast, which also holds a copy of the weights in that type).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph.artifacts import Workload
from megagraph.config import ParallelPlan, UserError
from megagraph.search.makespan import warm_up

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]
Size = float | NDArray[Any]
"""Bytes of one stage, or of many."""

TILE_BYTES = 2 << 20
"""Scores that the tiled kernel holds at once, but at least `MIN_TILE_ROWS` rows of one sequence."""

PRIOR: dict[str, float] = {
    "constant": 0.0,
    "table_rows": 0.0,
    "hidden": 5.0,
    "keys": 4.0,
    "ffn": 2.0,
    "statistics": 1.0,
    "scores": 2.25,
    "bias": 1.0,
    "features": 1.0,
    "readout": 1.0,
    "pipeline": 1.0,
    "ring": 1.0,
    "transient": 4.0,
    "transient_scores": 2.5,
    "tile": 4.0,
    "bucket": 1.0,
    "update": 0.5,
}
"""Expected live copies by regressor. Those at 0 have no expectation: `constant` is bytes, `table_rows` rows of the
feature table on the first stage beyond the R that are known."""

MIN_TILE_ROWS = 16


@dataclass(frozen=True)
class Stage:
    """One rank of a stage: its place, its layers, and the sequences (padded to K equal micro-batches) it sees.

    `first`, `last`, `layers`, `recompute` and `in_flight` may be arrays that broadcast: as many stages at once.
    `in_flight` is w: K under GPipe (None), the warm-up of the stage under 1F1B.
    """

    workload: Workload
    first: bool | Flags
    last: bool | Flags
    layers: int | Counts
    cp: int
    dp: int
    microbatches: int
    sequences: int
    recompute: int | Counts = 0
    in_flight: int | Counts | None = None

    @property
    def local_tokens(self) -> int:
        """S = ceil(N'/cp) + N_s."""
        return -(-self.workload.num_regular // self.cp) + self.workload.num_super

    @property
    def kept_layers(self) -> int | Counts:
        """Layers that keep their activations: the first `recompute` do not."""
        return self.layers - self.recompute

    @property
    def query_rows(self) -> int | Counts:
        """Query rows over the kept layers: S each, but what is read out in the last layer of the model."""
        spared = self.local_tokens - last_rows(self.workload, self.cp)
        return self.kept_layers * self.local_tokens - spared * (self.last & (self.kept_layers > 0))

    @property
    def kept_microbatches(self) -> int | Counts:
        """w."""
        return self.microbatches if self.in_flight is None else self.in_flight


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one time: bytes known exactly, and multiples of what the coefficients count."""

    name: str
    fixed: Mapping[str, Size]
    copies: Mapping[str, Size]

    def terms(self, coefficients: dict[str, float]) -> dict[str, Size]:
        """Bytes by what they hold."""
        return {**self.fixed, **{name: coefficients[name] * value for name, value in self.copies.items()}}


def last_rows(w: Workload, cp: int) -> int:
    """Query rows of the last layer on the rank that has most: its read-out tokens, or all rows for `all_to_all`."""
    own = -(-w.num_regular // cp)
    return own + w.num_super if w.attention == "all_to_all" else min(w.num_readout, own)


def distinct_rows(w: Workload, tokens: float) -> float:
    """Rows of the feature table among `tokens` tokens, if all rows were equally likely: R (1 - exp(-tokens / R)).

    Neighbourhoods overlap, so there are fewer; the fitted copies of `features` say how many.
    """
    return w.num_rows * -math.expm1(-tokens / w.num_rows) if w.num_rows else tokens


def batch_split(batch: int, dp: int, microbatches: int) -> tuple[int, int]:
    """Sequences of one micro-batch and of a replica: ceil(ceil(batch/dp)/K) and K times that (padding included)."""
    replica = -(-batch // dp)
    micro = -(-replica // microbatches)
    return micro, micro * microbatches


def stage_of(workload: Workload, plan: ParallelPlan, index: int) -> Stage:
    """Stage `index` (0 .. pp-1) of a plan."""
    if not 0 <= index < plan.pp:
        raise UserError(f"stage={index} is outside plan {plan.label}: name one of 0..{plan.pp - 1}")
    _, sequences = batch_split(workload.batch, plan.dp, plan.microbatches)
    in_flight = warm_up(plan.pp, index, plan.microbatches) if plan.schedule == "1f1b" else None
    return Stage(
        workload,
        index == 0,
        index == plan.pp - 1,
        plan.layers[index],
        plan.cp,
        plan.dp,
        plan.microbatches,
        sequences,
        plan.recompute[index] if plan.recompute else 0,
        in_flight,
    )


def table_parameters(w: Workload, replicas: int = 1) -> int:
    """Learned node rows times d on a rank of the first stage: all V, or ceil(V / replicas) of a sharded table."""
    rows = {"none": 0, "replicated": w.num_nodes, "sharded": -(-w.num_nodes // replicas)}[w.node_table]
    return rows * w.hidden


def num_parameters(
    w: Workload, *, first: bool | Flags, last: bool | Flags, layers: int | Counts, replicas: int = 1
) -> int | Counts:
    """Weights of a stage (ans-gt 2.5), on one of the cp x dp `replicas` that share a sharded node table.

    The bias of the global tokens, g*M, lives on every stage.
    """
    d, f = w.hidden, w.ffn
    layer = 4 * (d * d + d) + w.bias_channels * w.heads + w.heads + 2 * d * f + f + d + 4 * d
    embed = w.num_features * d + d + w.global_tokens * d + table_parameters(w, replicas)
    head = 2 * d + d * w.num_classes + w.num_classes
    return layers * layer + first * embed + last * head + w.global_tokens * w.bias_channels


def moments(stage: Stage, *, eager: bool) -> list[Moment]:
    """The moments of a step that can be the peak; a recomputed layer has one of its own.

    eager: gradients stay allocated between steps; otherwise they appear during backward. They do between the passes of
    a step that accumulates.
    """
    w, K, b = stage.workload, stage.microbatches, stage.sequences
    S, e, a = stage.local_tokens, w.element_bytes, w.activation_bytes
    kept, again = stage.kept_microbatches, np.asarray(stage.recompute) > 0
    replicas = stage.cp * stage.dp
    weights = e * num_parameters(w, first=stage.first, last=stage.last, layers=stage.layers, replicas=replicas)
    # The node table is reduced in place, or by rows, and updated by a fused kernel: it has neither bucket nor scratch.
    rest = weights - stage.first * e * table_parameters(w, replicas)
    resident, saved, passing = _resident(stage), _saved(stage), _passing(stage)
    # The first input of a stage is its receive buffer, which `pipeline` counts.
    inputs = e * b * S * w.hidden * (stage.recompute - (again & ~np.asarray(stage.first)))
    # Known, not fitted: within one data set nothing tells it from `constant`, and the next has other features.
    table = stage.first * float(e * w.num_features * w.num_rows)
    states = {"weights": weights, "optimiser": 2 * weights, "table": table}
    updated = {**states, "gradients": weights}
    running_states = {**states, "casts": a * rest // e if a < e else 0 * rest}
    graded = {**running_states, "gradients": weights}

    def moment(
        name: str, fixed: Mapping[str, Size], share: Size, copies: Mapping[str, Size], through: Size = 1.0
    ) -> Moment:
        scaled = {key: value * (share if key != "features" else through) for key, value in saved.items()}
        running = {key: scaled.get(key, 0.0) + value for key, value in copies.items()}
        return Moment(name, {**fixed, "inputs": inputs * through}, {**resident, **scaled, **running})

    full = kept / K
    early = graded if eager or w.accumulate > 1 else running_states
    found = [moment("first backward", early, full, passing, full)]
    update = {"bucket": (replicas > 1) * rest, "update": rest}
    found.append(moment("update", updated, 0.0, update, 0.0))
    if K > 1:
        left = np.minimum(kept, K - 1) / K
        found.append(moment("later backward", graded, left, passing, left))
    if again.any():
        redone = {key: value * again for key, value in _redone(stage).items()}
        copies = {**passing, **{key: passing.get(key, 0.0) + value for key, value in redone.items()}}
        redoing = moment("recompute", graded, (kept - 1) / K, copies, full)
        parts = ({key: value * again for key, value in own.items()} for own in (redoing.fixed, redoing.copies))
        found.append(Moment(redoing.name, *parts))
    return found


def _resident(stage: Stage) -> dict[str, Size]:
    """What stands during the whole step."""
    w, b, S, e = stage.workload, stage.sequences, stage.local_tokens, stage.workload.element_bytes
    neighbours = (1 - np.asarray(stage.first, dtype=int)) + (1 - np.asarray(stage.last, dtype=int))
    return {
        "constant": 1.0,
        "bias": float(e * b * S * w.num_tokens * (w.bias_channels + w.global_tokens)),
        "table_rows": stage.first * float(e * w.num_features),
        "pipeline": neighbours * float(w.activation_bytes * b * S * w.hidden),
    }


def _saved(stage: Stage) -> dict[str, Size]:
    """What backward of all K micro-batches needs, without recomputed layers."""
    w, b, S, e = stage.workload, stage.sequences, stage.local_tokens, stage.workload.element_bytes
    layers = _activations(w, b * stage.kept_layers * S, b * stage.query_rows)
    K = stage.microbatches
    rows = K * distinct_rows(w, b / K * S)
    return {
        **layers,
        "features": stage.first * float(rows * w.activation_bytes * w.num_features + b * S * 8),
        "readout": stage.last * float(e * b * (S * w.hidden + w.num_readout * (w.num_classes + w.hidden))),
    }


def _redone(stage: Stage) -> dict[str, Size]:
    """What one recomputed layer brings back for one micro-batch."""
    w, micro, S = stage.workload, stage.sequences / stage.microbatches, stage.local_tokens
    rows = np.where(stage.last & (np.asarray(stage.layers) == 1), last_rows(w, stage.cp), S)
    return _activations(w, micro * S, micro * rows)


def _activations(w: Workload, keys: Size, queries: Size) -> dict[str, Size]:
    """Activations of layers with so many rows of keys and of queries, all sequences together."""
    e, a, dense = w.element_bytes, w.activation_bytes, w.attention == "dense"
    return {
        "hidden": (2 * e + 3 * a) / 5 * queries * w.hidden,  # two of the five copies are the residual stream
        "keys": (e if dense else a) * keys * w.hidden,
        "ffn": a * queries * w.ffn,
        "statistics": queries * (16 + (0 if dense else e * w.heads)),
        "scores": queries * float(e * w.heads * w.num_tokens * dense),
    }


def _passing(stage: Stage) -> dict[str, Size]:
    """What a layer needs while it runs."""
    w, S, e = stage.workload, stage.local_tokens, stage.workload.element_bytes
    micro, dense = stage.sequences / stage.microbatches, w.attention == "dense"
    score = e * w.heads * S * w.num_tokens
    tile = min(micro * score, max(TILE_BYTES, MIN_TILE_ROWS * e * w.heads * w.num_tokens))
    return {
        "transient": e * micro * S * (w.hidden + w.ffn),
        "transient_scores": micro * score * dense,
        "tile": 0.0 if dense else tile,
        "ring": (stage.cp > 1) * 8 * w.activation_bytes * micro * S * w.hidden,
    }


def peak_bytes(coefficients: dict[str, float], stage: Stage) -> float:
    """Predicted peak bytes of one rank of `stage`, from the coefficients of `fit_memory`."""
    return float(peak_of_many(coefficients, stage))


def peak_of_many(coefficients: dict[str, float], stage: Stage) -> Array:
    """Peak bytes of as many stages as the arrays of `stage` describe; equal bit for bit to one at a time."""
    found = moments(stage, eager=bool(coefficients["eager_gradients"]))
    sizes = [sum(moment.terms(coefficients).values(), start=np.float64(0.0)) for moment in found]
    return np.asarray(np.maximum.reduce(np.broadcast_arrays(*sizes)))


def peak_moment(coefficients: dict[str, float], stage: Stage) -> tuple[str, dict[str, float]]:
    """When one stage is at its peak, and its bytes by what they hold."""
    found = moments(stage, eager=bool(coefficients["eager_gradients"]))
    terms = [{key: float(value) for key, value in moment.terms(coefficients).items()} for moment in found]
    at = int(np.argmax([sum(own.values()) for own in terms]))
    return found[at].name, terms[at]
