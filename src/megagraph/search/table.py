"""A search result as text for a terminal or a log."""

from __future__ import annotations

from collections.abc import Sequence

from megagraph.artifacts_search import Candidate, SearchResult, StageReport

MAX_FRONTIER_ROWS = 12


def table(result: SearchResult) -> str:
    """Pick, stages by time and memory, what binds, runner-up, price of a gigabyte, frontier."""
    best = result.best
    sequences = best.sequences or result.workload.batch
    proof = "proven optimum" if result.proven else f"at most {result.gap:.2%} above the optimum"
    lines = [
        f"pick      {best.plan.label}  ({best.strategy})",
        f"step      {_seconds(best.step_seconds)} for {sequences} sequences, largest rank {_bytes(best.peak_bytes)} of "
        f"{_bytes(result.limit_bytes)}",
        f"proof     {proof}: {result.num_enumerated} plans, {result.num_fitting} fit, found in "
        f"{_seconds(result.seconds)}" + (", with recompute" if result.recompute else ""),
    ]
    if result.parts:
        parts = {name: value / best.step_seconds for name, value in vars(result.parts).items()}
        lines.append("time      " + ", ".join(f"{name} {share:.1%}" for name, share in parts.items()))
    if result.binding:
        lines.append(f"bound by  {result.binding.constraint}, stage {result.binding.stage}: {result.binding.reason}")
    if result.runner_up:
        other = result.runner_up
        lines.append(f"runner-up {other.candidate.plan.label}: {other.reason}")
    if result.gigabyte:
        lines.append(f"1 GB      {_price(result)}")
    return "\n".join([*lines, "", *_stages(result.stages), "", *_frontier(result, sequences)])


def _price(result: SearchResult) -> str:
    price = result.gigabyte
    assert price is not None
    more = f"more: {-price.more:.1%} faster ({price.more_plan})" if price.more < -1e-9 else "more: no faster"
    if price.less is None:
        return f"{more}; less: nothing fits"
    return f"{more}; less: " + (f"{price.less:.1%} slower ({price.less_plan})" if price.less > 1e-9 else "no slower")


def _stages(stages: Sequence[StageReport]) -> list[str]:
    if not stages:
        return []
    terms = list(stages[0].bytes_by_term)
    rows = [["stage", "layers", "again", "forward", "backward", "update", "busy", "peak", *terms]]
    for index, stage in enumerate(stages):
        name = f"{index} {stage.device}".strip()
        update = stage.update_seconds + stage.all_reduce_seconds
        rows.append(
            [
                name,
                str(stage.layers),
                str(stage.recompute),
                _seconds(stage.forward_seconds),
                _seconds(stage.backward_seconds),
                _seconds(update),
                f"{stage.busy_fraction:.0%}",
                _bytes(stage.peak_bytes),
                *(_bytes(stage.bytes_by_term[term]) for term in terms),
            ]
        )
    return _aligned(rows)


def _frontier(result: SearchResult, sequences: int) -> list[str]:
    points = result.frontier
    step = max(1, -(-len(points) // MAX_FRONTIER_ROWS))
    shown = [*points[:-1:step], points[-1]] if points else []
    more = "" if len(shown) == len(points) else f" ({len(shown)} of {len(points)} shown)"
    rows = [["frontier" + more, "step", "per sequence", "peak"]]
    rows += [
        [
            one.plan.label,
            _seconds(one.step_seconds),
            _seconds(one.step_seconds / _sequences(one, sequences)),
            _bytes(one.peak_bytes),
        ]
        for one in shown
    ]
    return _aligned(rows)


def _sequences(one: Candidate, sequences: int) -> int:
    return one.sequences or sequences


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _seconds(value: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 1e-6:.3g} us"


def _bytes(value: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 1e3:.3g} kB"
