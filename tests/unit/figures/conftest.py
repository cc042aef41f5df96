"""Synthetic results in the exact formats of the other verbs: small numbers whose figures can be checked by hand."""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megagraph.artifacts import (
    ComputeRow,
    CostModel,
    HardwareProfile,
    Provenance,
    Quality,
    RunSummary,
    Timing,
    Workload,
)
from megagraph.artifacts_search import Candidate, SearchResult
from megagraph.config import FigureConfig, ParallelPlan, RunConfig, SplitConfig
from megagraph.figures import registry
from megagraph.files import write_csv
from megagraph.search import cost as cost_module

L_BREAK, GAMMA = 8.0, 1.68
PROVENANCE = Provenance(commit="abc123", device="cpu x2", threads=1, time="2026-01-01T00:00:00Z")
WORKLOAD = Workload(
    batch=256,
    num_regular=31,
    num_super=2,
    num_readout=1,
    layers=4,
    heads=4,
    hidden=32,
    ffn=32,
    bias_channels=4,
    global_tokens=1,
    num_features=16,
    num_classes=10,
)


def true_bytes(batch, layers, heads, hidden):
    return 2e6 + 500.0 * batch * layers * hidden * 33 + 9.0 * batch * layers * heads * 33**2


def true_seconds(batch, layers, heads, hidden):
    depth = layers + (GAMMA - 1) * max(0.0, layers - L_BREAK)
    return 1e-4 + batch * hidden * heads * 1e-6 * depth


def predict_cell(cost, row):
    sizes = [int(row[name]) for name in ("batch", "layers", "heads", "hidden")]
    seconds = true_seconds(*sizes)
    return cost_module.Cell(true_bytes(*sizes), seconds / 3, seconds / 3, seconds)


@pytest.fixture
def law(monkeypatch):
    """The cost model's prediction of a cell, replaced by the law that the synthetic grid was made with."""
    monkeypatch.setattr(cost_module, "predict_cell", predict_cell)


def grid_rows(noise=0.03, depths=(2, 4, 8, 16, 24, 32)):
    rng = np.random.default_rng(0)
    rows = []
    for batch, layers, heads, hidden in itertools.product((1, 2, 4, 8), depths, (4, 8, 16), (32, 64, 128)):
        seconds = true_seconds(batch, layers, heads, hidden) * (1 + noise * rng.standard_normal())
        peak = true_bytes(batch, layers, heads, hidden) * (1 + noise * rng.standard_normal())
        row = {"batch": batch, "layers": layers, "heads": heads, "hidden": hidden, "ffn": hidden}
        row |= {"num_regular": 31, "num_super": 2, "bias_channels": 4, "num_features": 16, "num_classes": 10}
        row |= {"peak_bytes": int(peak), "forward_seconds": seconds / 3, "backward_seconds": seconds / 2}
        row |= {"step_seconds": seconds, "step_iqr": seconds / 50, "repeats": 3, "memory_source": "MemTracker"}
        rows.append(row | {"device": "cpu x2", "threads": 1, "commit": "abc123"})
    return rows


def summary(run, plan, *, system="megagraph", status="ok", seconds=2.0, peak=(7_000_000, 7_000_000), **changes):
    body = {
        "run": run,
        "system": system,
        "dataset": "digits",
        "status": status,
        "split": SplitConfig(),
        "plan": plan,
        "plan_source": "config",
        "attention": "tiled",
        "sequences_per_step": 256,
        "num_tokens": 33,
        "samples_per_node": 1,
        "num_parameters": 1234,
        "epochs": 40,
        "best_epoch": 30,
        "val_accuracy": 0.91,
        "test_accuracy": 0.9,
        "final_test_accuracy": 0.89,
        "seconds_per_epoch": Timing(median=seconds, iqr=0.1, repeats=40),
        "peak_bytes": peak,
        "memory_source": "MemTracker",
        "provenance": PROVENANCE,
    }
    return RunSummary(**{**body, **changes})


def write_run(results, body, *, epochs=40, level=0.9):
    folder = results / "train" / body.run
    body.save(folder / "summary.json")
    rng = np.random.default_rng(len(body.run))
    rows = []
    for epoch in range(1, epochs + 1):
        accuracy = level * (1 - np.exp(-epoch / 8)) + 0.02 * rng.standard_normal()
        measured = epoch % 2 == 0
        row = {"epoch": epoch, "loss": 1 / epoch, "seconds": 2.0, "lr": 1e-4}
        rows.append(row | dict.fromkeys(("val_accuracy", "test_accuracy"), accuracy if measured else ""))
    write_csv(folder / "epochs.csv", rows)
    config = RunConfig(id=body.run, dataset="digits", system=body.system, model={"arch": _arch(body.system)})
    write_config(results, "run", body.run, config)


def _arch(system):
    return "gcn" if system == "gcn" else "hierarchical"


def write_config(results, kind, name, config):
    path = results / "config" / kind / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config.model_dump(mode="json")))


def candidates(world=4, layers=4):
    """Every plan of `world` ranks with synthetic costs: PP+DP is fastest, CP smallest, pure DP never efficient."""
    found = []
    for pp, cp in itertools.product((1, 2, 4), (1, 2, 4)):
        dp = world // (pp * cp)
        if pp * cp * dp != world:
            continue
        for cuts in itertools.combinations(range(1, layers), pp - 1):
            stages = tuple(np.diff((0, *cuts, layers)).tolist())
            for k in (1, 2, 4):
                plan = ParallelPlan(pp=pp, cp=cp, dp=dp, layers=stages, microbatches=k)
                seconds = 0.9 + 0.05 * cp + 0.3 * (max(stages) / layers * pp - 1) + 0.02 * k + 0.1 * (dp == world)
                peaks = tuple(3e7 / cp * (0.2 + n / layers + 0.3 * (s == 0)) for s, n in enumerate(stages))
                name = "+".join(n for n, d in (("PP", pp), ("CP", cp), ("DP", dp)) if d > 1)
                fits = max(peaks) <= 3e7
                found.append(Candidate(plan=plan, strategy=name, step_seconds=seconds, stage_bytes=peaks, fits=fits))
    return tuple(found)


def write_search(results, run="demo", *, world=4, oom=True):
    every = candidates(world)
    fitting = [plan for plan in every if plan.fits]
    best = min(fitting, key=lambda plan: plan.step_seconds)
    front = [p for p in fitting if not any(_dominates(q, p) for q in fitting)]
    result = SearchResult(
        workload=WORKLOAD,
        world_size=world,
        limit_bytes=3e7,
        best=best,
        frontier=tuple(front),
        candidates=every,
        num_enumerated=len(every),
        num_fitting=len(fitting),
        seconds=0.012,
        provenance=PROVENANCE,
    )
    result.save(results / "search" / run / "search.json")
    rows = []
    for index, plan in enumerate([best, *front[:3], every[0]]):
        lost = oom and plan is every[0]
        row = {"strategy": plan.strategy, "label": plan.plan.label, "pp": plan.plan.pp, "cp": plan.plan.cp}
        row |= {"dp": plan.plan.dp, "layers": ";".join(map(str, plan.plan.layers))}
        row |= {"microbatches": plan.plan.microbatches, "step_seconds": "" if lost else plan.step_seconds * 1.04}
        row |= {"step_iqr": "" if lost else 0.01, "repeats": 3, "peak_bytes": "" if lost else plan.peak_bytes * 0.97}
        row |= {"peak_bytes_by_rank": "", "predicted_seconds": plan.step_seconds, "predicted_bytes": plan.peak_bytes}
        row |= {"status": "oom" if lost else "ok", "world_size": world, "cores": 2, "device": "cpu x2", "threads": 1}
        if index == 0 or plan is not best:
            rows.append(row | {"commit": "abc123"})
    write_csv(results / "search" / run / "plans.csv", rows)
    return result


def _dominates(q, p):
    no_worse = q.step_seconds <= p.step_seconds and q.peak_bytes <= p.peak_bytes
    return no_worse and (q.step_seconds < p.step_seconds or q.peak_bytes < p.peak_bytes)


def write_fit(results, run="demo", *, rows=None):
    folder = results / "search" / run
    rows = rows if rows is not None else grid_rows()
    write_csv(folder / "grid-0.csv", rows[: len(rows) // 2])
    write_csv(folder / "grid-1.csv", rows[len(rows) // 2 :])
    quality = Quality(
        mape_percent=4.2, bias_percent=0.1, r2=0.99, num_points=72, held_out=True, worst="b=1", worst_percent=9
    )
    CostModel(
        device="cpu x2",
        world_size=2,
        workload=WORKLOAD,
        memory={},
        compute={},
        comm={},
        depth={"form": 1.0, "l_break": L_BREAK, "gamma": GAMMA, "l_break_low": 7.0, "l_break_high": 9.5},
        quality={"memory": quality},
        valid={},
        provenance=PROVENANCE,
    ).save(folder / "cost.json")
    parts = ("layer_forward", "layer_backward", "embed_forward", "embed_backward", "head_forward", "head_backward")
    times = dict.fromkeys(parts, Timing(median=0.1, iqr=0.01, repeats=3))
    HardwareProfile(
        device="cpu x2",
        world_size=2,
        warmup=2,
        workload=WORKLOAD,
        compute=(ComputeRow(cp=1, sequences=8, local_tokens=33, **times),),
        comm=(),
        memory=(),
        memory_source="MemTracker",
        provenance=PROVENANCE,
    ).save(folder / "profile.json")


def plan(pp, cp, dp, layers):
    return ParallelPlan(pp=pp, cp=cp, dp=dp, layers=layers)


TABLE_RUNS = (
    summary("single", plan(1, 1, 1, (4,)), seconds=4.0, peak=(40_000_000,), test_accuracy=0.9),
    summary("cp", plan(1, 2, 1, (4,)), seconds=2.5, peak=(16_000_000, 16_000_000), test_accuracy=0.901),
    summary("even", plan(2, 1, 1, (2, 2)), seconds=3.0, peak=(30_000_000, 12_000_000), test_accuracy=0.8995),
    summary("uneven", plan(2, 1, 1, (1, 3)), seconds=2.2, peak=(21_000_000, 20_000_000), test_accuracy=0.9),
)


def build(root):
    """A complete results folder of the demo's kind, without figures."""
    for body in TABLE_RUNS:
        write_run(root, body)
    write_run(root, summary("mega", plan(1, 2, 1, (4,))), level=0.93)
    write_run(root, summary("gcn", plan(1, 1, 1, (4,)), system="gcn", attention="none", test_accuracy=0.85), level=0.86)
    write_fit(root)
    write_search(root)
    write_config(root, "workload", "demo", RunConfig(id="demo", dataset="digits").workload)
    for name, spec in (
        ("fig8b", FigureConfig(runs=("mega", "gcn"))),
        ("fig9a", FigureConfig(search="demo")),
        ("fig9b", FigureConfig(search="demo")),
        ("fig10", FigureConfig(search="demo")),
        ("table1", FigureConfig(runs=tuple(body.run for body in TABLE_RUNS))),
    ):
        write_config(root, "figure", name, spec)
    return root


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    return build(tmp_path_factory.mktemp("pristine") / "results")


@pytest.fixture
def results(pristine, tmp_path):
    """A copy of the results that a test may change."""
    return Path(shutil.copytree(pristine, tmp_path / "results"))


@pytest.fixture(scope="session")
def drawn(pristine, tmp_path_factory):
    """Results with every figure drawn, and the bytes of the files before the figures were drawn again over them."""
    root = Path(shutil.copytree(pristine, tmp_path_factory.mktemp("drawn") / "results"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_module, "predict_cell", predict_cell)
        for name in registry.FIGURES:
            registry.make(name, root, root / "figures")
        first = {path.name: path.read_bytes() for path in sorted((root / "figures").iterdir())}
        for name in registry.FIGURES:
            registry.make(name, root, root / "figures")
    return SimpleNamespace(results=root, first=first)


@pytest.fixture
def make():
    """The builders above, for tests that need other files."""
    return SimpleNamespace(
        summary=summary,
        plan=plan,
        write_run=write_run,
        write_config=write_config,
        write_search=write_search,
        write_fit=write_fit,
        grid_rows=grid_rows,
        gamma=GAMMA,
        l_break=L_BREAK,
        true_bytes=true_bytes,
        true_seconds=true_seconds,
        provenance=PROVENANCE,
    )
