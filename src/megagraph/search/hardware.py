"""A cost model for hardware that was not measured, scaled from one that was: marked as an estimate, never mixed.

Products, scores, softmax and element-wise parts each go from one roofline to the other; what every operation costs at
least, by the time of a dispatch; messages are those of the links. Memory does not change, only its limit.

Legend: S local and N all tokens of a sequence, M bias channels, H heads, d hidden, f FFN, F features, C classes,
R read-out tokens; e bytes per element, a those of what layers compute; G ranks of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megagraph.artifacts import CostModel, Workload
from megagraph.config import UserError, validated
from megagraph.config_hardware import HardwareConfig, Link
from megagraph.files import read_yaml
from megagraph.search.cost import FLOP_WEIGHTS, LAYER_TERMS, layer_terms, rest_terms

VECTOR_FLOPS = {"softmax": 20.0, "token": 10.0}
"""Operations per element, by vector units."""
PASSES = 4.0
"""Times that an element of softmax or of the element-wise parts goes to or from memory."""
LARGEST_MESSAGE = 1e9

Work = tuple[float, float, bool]
"""Operations, bytes, and whether the operations are products in the type that layers compute in."""


def load_hardware(path: Path) -> HardwareConfig:
    """A hardware file; `UserError` names the file and an unknown or wrong key."""
    hardware: HardwareConfig = validated(
        HardwareConfig, read_yaml(path, "name one of config/hardware/*.yaml"), str(path)
    )
    return hardware


def describing(device: str, folder: Path) -> HardwareConfig:
    """The hardware file of a folder that describes a profiled device."""
    for path in sorted(folder.glob("*.yaml")):
        found = load_hardware(path)
        if device in found.devices:
            return found
    raise UserError(
        f"the cost model was measured on {device!r}, which no file of {folder} names: add it to `devices` of the file "
        "that describes it"
    )


def check_numbers(cost: CostModel) -> None:
    """Raise `UserError` for a coefficient that is no number: a search would rank plans by it."""
    for name, value in _numbers("", cost.model_dump(include={"memory", "compute", "comm", "depth"})):
        if not math.isfinite(value):
            raise UserError(f"the cost model has {name}={value}: profile again and fit again")


def _numbers(name: str, body: Any) -> Iterator[tuple[str, float]]:
    if isinstance(body, dict):
        for key, value in body.items():
            yield from _numbers(f"{name}.{key}" if name else str(key), value)
    elif isinstance(body, list | tuple):
        for value in body:
            yield from _numbers(name, value)
    else:
        yield name, float(body)


def estimate(
    cost: CostModel,
    source: HardwareConfig,
    target: HardwareConfig,
    devices: int,
    nodes: int = 1,
    *,
    allow_tf32: bool = False,
) -> CostModel:
    """The cost model of `devices` of type `target` on `nodes`, scaled from one measured on `source`.

    Layers are scaled from the times at cp 1, so that every cp degree that divides `devices` has a price. Quality and
    intervals are those of the measured model and stay behind; `estimated_from` names its device.
    """
    if cost.estimated_from:
        raise UserError(f"the cost model is already estimated from {cost.estimated_from}: start from a measured one")
    if devices < 1 or nodes < 1 or devices % nodes:
        raise UserError(f"{devices} devices on {nodes} nodes: give a number of devices that the nodes divide")
    if cost.workload.element_bytes != 4:
        raise UserError("hardware files have no rates for float64: estimate from a profile in float32")
    if "1" not in cost.compute:
        raise UserError("the cost model has no times for cp=1, from which others are scaled: profile with one rank")
    scale = _Scale(cost, source, target, allow_tf32)
    groups = [g for g in range(1, devices + 1) if devices % g == 0]
    links = {g: target.within_node if g <= devices // nodes else target.between_nodes for g in groups}
    compute = {str(cp): scale.parts(cp, links[cp]) for cp in groups if cp <= cost.workload.num_regular}
    comm = {f"all_reduce/{g}": _all_reduce(g, links[g]) for g in groups if g > 1}
    if devices > 1:
        # Stages are the outermost: their neighbours may be on other nodes.
        comm["p2p"] = _message(target.between_nodes if nodes > 1 else target.within_node)
    return cost.model_copy(
        update={
            "device": f"{target.name} (estimated from {cost.device})",
            "world_size": devices,
            "compute": compute | scale.grid(),
            "comm": comm,
            "quality": {},
            "intervals": {},
            "depth_readings": {},
            "estimated_from": cost.device,
        }
    )


def limit_bytes(hardware: HardwareConfig) -> float:
    """Bytes that tensors may fill."""
    return hardware.memory_bytes.value - hardware.reserved_bytes


def _all_reduce(ranks: int, link: Link) -> tuple[tuple[float, float], ...]:
    """A ring: 2 (G-1) messages of a G-th each."""
    return tuple((n, 2 * (ranks - 1) * _seconds(link, n / ranks)) for n in (1.0, LARGEST_MESSAGE))


def _message(link: Link) -> tuple[tuple[float, float], ...]:
    return tuple((n, _seconds(link, n)) for n in (1.0, LARGEST_MESSAGE))


def _seconds(link: Link, size: float) -> float:
    return link.latency_seconds.value + size / link.bytes_per_second.value


class _Scale:
    """Ratios of two devices for the operations of one workload."""

    def __init__(self, cost: CostModel, source: HardwareConfig, target: HardwareConfig, allow_tf32: bool) -> None:
        self._cost, self._w = cost, cost.workload
        self._source, self._target, self._allow_tf32 = source, target, allow_tf32
        self._dispatch = target.dispatch_seconds.value / source.dispatch_seconds.value

    def parts(self, cp: int, link: Link) -> dict[str, float]:
        """Fixed and per-sequence seconds of layer, embedding and head at a cp degree."""
        measured, w = self._cost.compute["1"], self._w
        table = {}
        for direction, rounds in (("forward", 1), ("backward", 2)):
            slope = measured[f"layer_{direction}_slope"] * self._layer_factors(cp, direction)
            wait, late = self._exchange(cp, link, float(slope[1:3].sum()))
            fixed = measured[f"layer_{direction}_fixed"] * self._dispatch
            table[f"layer_{direction}_fixed"] = fixed + rounds * late
            table[f"layer_{direction}_slope"] = float(slope.sum()) + rounds * wait
            for part, work in (("embed", _embed), ("head", _head)):
                ratio = self._time(work(w, cp), self._target) / self._time(work(w, 1), self._source)
                table[f"{part}_{direction}_fixed"] = measured[f"{part}_{direction}_fixed"] * self._dispatch
                table[f"{part}_{direction}_slope"] = measured[f"{part}_{direction}_slope"] * ratio
        return table

    def grid(self) -> dict[str, dict[str, float]]:
        """The laws of whole models, where a grid was measured."""
        ratios = dict(zip(LAYER_TERMS[1:], self._ratios(1), strict=True))
        embed = self._time(_embed(self._w, 1), self._target) / self._time(_embed(self._w, 1), self._source)
        ratios |= {"rest_features": embed, "rest_token": ratios["token"]}
        ratios |= dict.fromkeys(("fixed", "rest_fixed", "layer"), self._dispatch)
        moved = (1.0, 1e6, False)
        ratios["parameter"] = self._time(moved, self._target) / self._time(moved, self._source)
        laws = ("grid_forward", "grid_backward", "update")
        found = {law: self._cost.compute[law] for law in laws if law in self._cost.compute}
        return {law: {key: value * ratios[key] for key, value in table.items()} for law, table in found.items()}

    def _layer_factors(self, cp: int, direction: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """By operation: its share of the measured layer, times its work at `cp` over that at 1, times the ratio."""
        weights = self._cost.compute.get(f"grid_{direction}", FLOP_WEIGHTS)
        one, some = layer_terms(self._w, 1, 1.0)[1:], layer_terms(self._w, cp, 1.0)[1:]
        priced = one * np.array([weights[name] for name in LAYER_TERMS[1:]])
        priced = priced if priced.sum() > 0 else one * np.array([FLOP_WEIGHTS[name] for name in LAYER_TERMS[1:]])
        return np.asarray(priced / priced.sum() * some / one * self._ratios(cp))

    def _ratios(self, cp: int) -> list[float]:
        works = _operations(self._w, cp)
        return [self._time(works[name], self._target) / self._time(works[name], self._source) for name in works]

    def _time(self, work: Work, hardware: HardwareConfig) -> float:
        """Roofline: operations at the achieved rate, or bytes at the achieved bandwidth, whichever takes longer."""
        operations, moved, product = work
        kind = "fp32"
        if product:
            kind = "bf16" if self._w.autocast == "bfloat16" else "tf32" if self._allow_tf32 else "fp32"
        rate = getattr(hardware.peak_flops, kind).value * getattr(hardware.achieved_fraction, kind).value
        bandwidth = hardware.memory_bytes_per_second.value * hardware.achieved_memory_fraction.value
        return max(operations / rate, moved / bandwidth)

    def _exchange(self, cp: int, link: Link, attention_seconds: float) -> tuple[float, float]:
        """What a forward waits for other ranks, per sequence and at least: keys and values in cp - 1 steps behind a
        block of attention each, or all four of `all_to_all` with nothing to hide behind."""
        if cp == 1:
            return 0.0, 0.0
        w = self._w
        size = (-(-w.num_regular // cp) + w.num_super) * w.hidden * w.activation_bytes
        late = (cp - 1) * link.latency_seconds.value
        if w.attention == "all_to_all":
            return 4 * size * (cp - 1) / cp / link.bytes_per_second.value, 4 * late
        hidden = attention_seconds / cp
        return (cp - 1) * max(0.0, 2 * size / link.bytes_per_second.value - hidden), late


def _operations(w: Workload, cp: int) -> dict[str, Work]:
    """Of one layer and sequence, in the order of `LAYER_TERMS`."""
    S, N = -(-w.num_regular // cp) + w.num_super, w.num_tokens
    d, f, e, a = w.hidden, w.ffn, w.element_bytes, w.activation_bytes
    elements = {"softmax": float(w.heads * S * N), "token": float(S * (d + f))}
    return {
        "linear": (float(S * (8 * d * d + 4 * d * f)), float(a * S * (10 * d + 2 * f)), True),
        "scores": (float(S * N * (4 * d + 2 * w.bias_channels * w.heads)), float(4 * a * S * d), False),
        **{name: (VECTOR_FLOPS[name] * count, PASSES * e * count, False) for name, count in elements.items()},
    }


def _embed(w: Workload, cp: int) -> Work:
    S = -(-w.num_regular // cp) + w.num_super
    features = float(rest_terms(w, cp, 1.0)[1])
    return 2 * features, float(w.activation_bytes * (features / w.hidden + S * w.hidden)), True


def _head(w: Workload, cp: int) -> Work:
    S = -(-w.num_regular // cp) + w.num_super
    return 2.0 * w.num_readout * w.hidden * w.num_classes, float(w.element_bytes * S * w.hidden), False
