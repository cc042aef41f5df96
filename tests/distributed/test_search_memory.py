"""Peaks of plans with 1F1B and recompute, predicted from a profile that ran neither, against the program itself."""

import json

import pytest
from engine_case import write_planted

from megagraph.artifacts import MemoryRow, Workload
from megagraph.config import ParallelPlan, RunConfig
from megagraph.search.fit_memory import fit_memory
from megagraph.search.memory import Stage, peak_bytes, stage_of

pytestmark = pytest.mark.distributed

LAYERS = (3, 3)
PLANS = [
    ParallelPlan(pp=2, layers=LAYERS, microbatches=4, schedule=schedule, recompute=recompute)
    for schedule in ("gpipe", "1f1b")
    for recompute in ((), (2, 0), (3, 3))
]
WORKLOAD = RunConfig.model_validate(
    {
        "id": "small",
        "dataset": "small",
        "model": {"layers": 6, "heads": 2, "hidden": 32, "ffn": 32, "bias_channels": 2},
        "sampling": {"num_sampled": 5},
        "train": {"batch": 64},
        "parallel": {"world_size": 2},
        "profile": {"warmup": 1, "microbatch_sizes": [64]},
    }
).workload


def peaks_rank(data, out):
    from megagraph.parallel.mesh import process_group
    from megagraph.profile.bench import Bench, workload_of
    from megagraph.profile.memory import _everyone, memory_rows
    from megagraph.train.engine import load_data

    loaded = load_data(data, "default")
    with process_group(2, "cpu", 60):
        rows, _ = memory_rows(WORKLOAD, loaded, 2)
        peaks = []
        for plan in PLANS:
            bench = Bench.build(WORKLOAD, loaded, plan, WORKLOAD.batch)
            peaks.append([row.peak_bytes for row in _everyone(bench, plan, bench.peak()[0])])
        if bench.mesh.rank == 0:
            sizes = workload_of(WORKLOAD, loaded, bench.engine).model_dump()
            body = {"workload": sizes, "rows": [row.model_dump() for row in rows], "peaks": peaks}
            out.write_text(json.dumps(body))


@pytest.fixture(scope="module")
def measured(run_ranks, tmp_path_factory):
    """Workload, coefficients of the profile, and peaks [plans][stages]."""
    folder = tmp_path_factory.mktemp("planted")
    write_planted(folder)
    run_ranks(2, peaks_rank, folder, folder / "peaks.json")
    body = json.loads((folder / "peaks.json").read_text())
    workload, rows = Workload(**body["workload"]), [MemoryRow(**row) for row in body["rows"]]
    stages = [
        Stage(workload, r.first, r.last, r.layers, r.cp, 2 if r.first and r.last else 1, r.microbatches, r.sequences)
        for r in rows
    ]
    return workload, fit_memory(stages, [row.peak_bytes for row in rows]), body["peaks"]


def test_peaks_of_schedules_and_recompute_are_predicted(measured):
    """Never much below what is measured; a recomputed layer is priced a little high (its buffers shrink in time)."""
    workload, coefficients, peaks = measured
    for plan, own in zip(PLANS, peaks, strict=True):
        for stage, peak in enumerate(own):
            predicted = peak_bytes(coefficients, stage_of(workload, plan, stage))
            assert 0.97 < predicted / peak < 1.25, (plan.label, stage)


def test_schedule_and_recompute_save_what_they_should(measured):
    _, _, peaks = measured
    largest = {plan.label: max(own) for plan, own in zip(PLANS, peaks, strict=True)}
    kept, some, everything, short, *_ = largest.values()
    assert kept > some > everything
    assert kept > 1.5 * short
