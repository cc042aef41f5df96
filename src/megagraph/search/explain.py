"""Why a plan is the pick: its stages by what they hold and do, what binds it, what came next, what memory is worth.

Legend: P stages, K micro-batches; f, b, a seconds of forward, backward and update of a stage.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from megagraph.artifacts_search import Binding, GigabytePrice, RunnerUp, StageReport, StepParts
from megagraph.config import ParallelPlan
from megagraph.search.makespan import makespan
from megagraph.search.memory import peak_moment, stage_of
from megagraph.search.solver import Found, Solver
from megagraph.search.stages import stage_roles
from megagraph.search.tables import Limit, Problem, candidate

GB = 1e9
TIE = 1e-9
GROUPS = {
    "weights": ("weights", "casts"),
    "gradients": ("gradients",),
    "optimiser": ("optimiser",),
    "activations": ("hidden", "keys", "ffn", "statistics", "scores", "readout", "inputs"),
    "bias": ("bias",),
    "features": ("features", "table_rows"),
    "buffers": ("pipeline", "ring", "bucket", "transient", "transient_scores", "tile", "update"),
    "other": ("constant",),
}
"""Coefficients of the memory model by what a reader calls them."""


def explain(problem: Problem, best: Found, rival: Found | None) -> dict[str, Any]:
    """The explaining fields of a `SearchResult`; `rival` is the best plan of other degrees, if any fits."""
    free = Solver(problem)
    unlimited = free.best(Limit(extra=math.inf))
    assert unlimited is not None, "without a limit everything fits"
    stages = stage_reports(problem, best)
    parts = step_parts(problem, best)
    return {
        "stages": stages,
        "parts": parts,
        "binding": _binding(problem, best, unlimited, stages),
        "runner_up": None if rival is None else _runner_up(problem, best, rival, parts),
        "gigabyte": _gigabyte(problem, free, best),
    }


def stage_reports(problem: Problem, found: Found) -> tuple[StageReport, ...]:
    """Seconds and bytes of each stage of a plan."""
    cell, plan = found.cell, plan_of(problem, found)
    costs, places = problem.tables.costs(cell), problem.tables.places(cell)
    workload, margin = problem.sized(cell.dp), problem.cost.memory_margin
    reports = []
    for stage, role in enumerate(stage_roles(cell.pp)):
        n, q, place = found.layers[stage], found.recompute[stage], places[stage]
        moment, terms = peak_moment(problem.cost.memory, stage_of(workload, plan, stage))
        forward = float(costs.forward[role, n]) / place.speed
        backward = float(costs.backward_with(role, np.array(n), np.array(q))) / place.speed
        peak = sum(terms.values())
        reports.append(
            StageReport(
                layers=n,
                recompute=q,
                device=place.name,
                forward_seconds=forward,
                backward_seconds=backward,
                update_seconds=float(costs.optimiser[role, n]) / place.speed,
                all_reduce_seconds=float(costs.reduce[role, n]),
                busy_fraction=cell.microbatches * (forward + backward) / found.seconds,
                moment=moment,
                bytes_by_term={group: sum(terms.get(name, 0.0) for name in names) for group, names in GROUPS.items()},
                peak_bytes=peak,
                upper_bytes=peak * margin,
                limit_bytes=place.limit_bytes,
            )
        )
    return tuple(reports)


def plan_of(problem: Problem, found: Found) -> ParallelPlan:
    """The plan of a result."""
    return candidate(problem, found.cell, found.layers, found.recompute, found.seconds).plan


def step_parts(problem: Problem, found: Found) -> StepParts:
    """Where the seconds of a step go, by leaving out updates, then messages, then waiting."""
    cell, costs = found.cell, problem.tables.costs(found.cell)
    places, roles = problem.tables.places(cell), stage_roles(cell.pp)
    speed = np.array([place.speed for place in places])
    n, q = np.array(found.layers), np.array(found.recompute)
    f, b = costs.forward[roles, n] / speed, costs.backward_with(roles, n, q) / speed
    none = np.zeros(cell.pp)

    def length(link: float) -> float:
        return float(makespan(cell.schedule, f, b, none, microbatches=cell.microbatches, link=link))

    compute = cell.microbatches * float((f + b).mean())
    alone, linked = length(0.0), length(costs.link)
    return StepParts(compute=compute, waiting=alone - compute, messages=linked - alone, update=found.seconds - linked)


def _label(problem: Problem, found: Found) -> str:
    return plan_of(problem, found).label


def _binding(problem: Problem, best: Found, unlimited: Found, stages: tuple[StageReport, ...]) -> Binding:
    """Memory, if more of it would help; else the stage that is busy longest."""
    if unlimited.value < best.value * (1 - TIE):
        tight = max(range(len(stages)), key=lambda stage: stages[stage].upper_bytes / stages[stage].limit_bytes)
        needs = [report.upper_bytes for report in stage_reports(problem, unlimited)]
        worst = int(np.argmax(needs))
        saved = 1 - unlimited.value / best.value
        return Binding(
            constraint="memory",
            stage=tight,
            reason=f"{_label(problem, unlimited)} would take {saved:.1%} less time but needs "
            f"{needs[worst] / GB:.3g} GB on stage {worst}",
        )
    slow = max(range(len(stages)), key=lambda stage: stages[stage].busy_fraction)
    return Binding(
        constraint="time",
        stage=slow,
        reason=f"stage {slow} computes during {stages[slow].busy_fraction:.0%} of the step; "
        "no plan is faster, whatever the memory",
    )


def _runner_up(problem: Problem, best: Found, rival: Found, parts: StepParts) -> RunnerUp:
    """What of its step takes longer than the pick's, per sequence."""
    own = step_parts(problem, rival)
    ours, theirs = (problem.sequences(one.cell.dp) for one in (best, rival))
    slower = {name: value / theirs - vars(parts)[name] / ours for name, value in vars(own).items()}
    name = max(slower, key=lambda key: slower[key])
    gap = rival.value / best.value - 1
    if gap <= TIE:
        reason = "as fast, but of more memory or found later"
    else:
        reason = f"{gap:.1%} slower: {name} takes {1e3 * slower[name] * ours:.3g} ms more per {ours} sequences"
    return RunnerUp(
        candidate=candidate(problem, rival.cell, rival.layers, rival.recompute, rival.seconds),
        slower=gap,
        parts=own,
        reason=reason,
    )


def _gigabyte(problem: Problem, free: Solver, best: Found) -> GigabytePrice:
    """One GB more (`free` has been asked for no less), and one less."""
    more = free.best(Limit(extra=GB))
    assert more is not None, "more memory never hurts"
    devices = problem.config.devices
    smallest = min((1e9 * device.memory_gb for device in devices), default=problem.limit_bytes)
    less = Solver(problem).best(Limit(extra=-GB)) if smallest > GB else None
    if less is None and smallest > GB and problem.config.recompute == "if_needed":
        less = Solver(replace(problem, recompute=True)).best(Limit(extra=-GB))
    return GigabytePrice(
        more=more.value / best.value - 1,
        more_plan=_label(problem, more),
        less=None if less is None else less.value / best.value - 1,
        less_plan="" if less is None else _label(problem, less),
    )
