"""The table of learned rows, replicated or sharded: every layout equals one process, in memory and on disk as well."""

import shutil

import pytest
from problem import NUM_NODES, Problem, parallel_run, reference
from test_layouts import STEPS, assert_equals_truth
from test_training import MANIFEST, assert_same, data, interrupted_rank, losses, run_config, train_rank  # noqa: F401

from megagraph.artifacts import RunSummary
from megagraph.config import CoarseningConfig, ParallelPlan, PlantedConfig
from megagraph.graph.coarsen import coarsen
from megagraph.graph.planted import planted
from megagraph.graph.store import save_coarsening, save_graph
from megagraph.search.fit_memory import fit_memory
from megagraph.search.memory import Stage, peak_bytes, stage_of
from megagraph.train.export import export, load_exported

pytestmark = pytest.mark.distributed

LAYOUTS = [
    (ParallelPlan(layers=(4,), microbatches=2), False),
    (ParallelPlan(dp=2, layers=(4,), microbatches=2), True),
    (ParallelPlan(dp=2, layers=(4,), microbatches=2), False),
    (ParallelPlan(cp=2, layers=(4,)), True),
    (ParallelPlan(pp=2, dp=2, layers=(1, 3), microbatches=2), True),
    (ParallelPlan(pp=2, dp=2, layers=(3, 1), microbatches=2, schedule="1f1b"), True),
    (ParallelPlan(pp=2, dp=2, layers=(3, 1), microbatches=2), False),
    (ParallelPlan(cp=2, dp=2, layers=(4,), microbatches=2), True),
]


@pytest.mark.parametrize(("plan", "sharded"), LAYOUTS, ids=[f"{p.label} {s}".replace(" ", "_") for p, s in LAYOUTS])
def test_layout_equals_single_process(run_ranks, plan, sharded):
    problem = Problem(nodes=NUM_NODES, clip_norm=0.1)
    assert_equals_truth(
        run_ranks(plan.world_size, parallel_run, problem, plan, STEPS, "tiled", "ring", sharded), problem
    )


@pytest.mark.parametrize("nodes", [5, 3])
def test_ranks_without_rows(run_ranks, nodes):
    """The last of four ranks holds fewer rows than the others, or none."""
    problem = Problem(nodes=nodes)
    plan = ParallelPlan(cp=2, dp=2, layers=(4,), microbatches=2)
    assert_equals_truth(run_ranks(4, parallel_run, problem, plan, STEPS, "tiled", "ring", True), problem)


def test_the_table_matters():
    loss, gradients, _ = reference(Problem(nodes=NUM_NODES), 1)[0]
    assert gradients["embed.nodes.weight"].abs().max() > 1e-6
    assert loss != reference(Problem(), 1)[0][0]


def embedded(plan, world_size=1, node_table="sharded", epochs=3, **options):
    run = run_config(plan, world_size, epochs, **options)
    model = run.model.model_copy(update={"node_embedding": True})
    return run.model_copy(
        update={"model": model, "parallel": run.parallel.model_copy(update={"node_table": node_table})}
    )


def test_a_sharded_table_resumes_under_other_layouts_and_is_exported_whole(run_ranks, data, tmp_path):  # noqa: F811
    """Saved in two parts, resumed in three, and replicated: losses and weights of the single process."""
    (data / "manifest.json").write_text(MANIFEST.model_dump_json().replace("{", '{"schema": "megagraph.graph/1", ', 1))
    single = tmp_path / "single"
    run_ranks(1, train_rank, embedded({"layers": [4]}), data, single)
    saved = tmp_path / "saved"
    run_ranks(4, interrupted_rank, embedded({"pp": 2, "dp": 2, "layers": [1, 3]}, 4), data, saved)
    second = [embedded({"dp": 3, "layers": [4]}, 3), embedded({"cp": 2, "layers": [4]}, 2, "replicated")]
    for number, run in enumerate(second):
        out = tmp_path / str(number)
        shutil.copytree(saved, out)
        run_ranks(run.parallel.world_size, train_rank, run, data, out, True)
        assert_same(losses(out), losses(single))
        export(run, data, out, out / "model.safetensors")
    export(embedded({"layers": [4]}), data, single, single / "model.safetensors")
    truth, _ = load_exported(single / "model.safetensors")
    assert truth.embed.nodes.weight.shape == (120, 8)
    assert RunSummary.load(single / "summary.json").num_parameters == sum(p.numel() for p in truth.parameters())
    for number in range(2):
        model, _ = load_exported(tmp_path / str(number) / "model.safetensors")
        summary = RunSummary.load(tmp_path / str(number) / "summary.json")
        assert summary.num_parameters == RunSummary.load(single / "summary.json").num_parameters
        for (name, parameter), (_, expected) in zip(model.named_parameters(), truth.named_parameters(), strict=True):
            assert (parameter - expected).abs().max() <= 1e-9, name


def peaks_rank(config, folder, profiled):
    """Tracked peaks of both ranks under dp=2, the workload, and with `profiled` the points of a memory model."""
    import torch.distributed as dist

    from megagraph.parallel.mesh import process_group
    from megagraph.profile.bench import Bench, workload_of
    from megagraph.profile.memory import memory_rows
    from megagraph.train.engine import load_data

    loaded = load_data(folder, "default")
    with process_group(2, "cpu", 60.0):
        bench = Bench.build(config, loaded, config.parallel.plan, config.batch)
        peaks = [0, 0]
        dist.all_gather_object(peaks, bench.peak()[0])
        rows = memory_rows(config, loaded, 2)[0] if profiled else []
        return peaks, workload_of(config, loaded, bench.engine), rows


def test_predicted_bytes_are_the_tracked_ones(run_ranks, tmp_path):
    """A table of 4001 rows beside a small model: weights, gradient and two moments on the first stage, halved by dp."""
    graph = planted("large", PlantedConfig(source="planted", nodes=4001, communities=3, features=8))
    save_graph(graph, tmp_path / "graph.safetensors")
    save_coarsening(coarsen(graph, CoarseningConfig(ratio=0.01)), tmp_path / "default.safetensors")
    found = {}
    for node_table in ("replicated", "sharded"):
        run = embedded({"dp": 2, "layers": [4]}, 2, node_table, batch=4, sampling={"samples": 1, "powers": "induced"})
        model = run.model.model_copy(update={"hidden": 32, "ffn": 32})
        profile = run.profile.model_copy(update={"microbatch_sizes": (2, 8)})
        config = run.model_copy(update={"model": model, "profile": profile}).workload
        found[node_table] = run_ranks(2, peaks_rank, config, tmp_path, node_table == "sharded")[0]
    (whole, _, _), (half, workload, rows) = found["replicated"], found["sharded"]
    assert max(whole) - max(half) == pytest.approx(4 * 2000 * 32 * 8, rel=0.02)
    assert half[0] - half[1] == pytest.approx(4 * 32 * 8, abs=2000)
    dp = [2 // row.cp if row.first and row.last else 1 for row in rows]
    stages = [
        Stage(workload, row.first, row.last, row.layers, row.cp, degree, row.microbatches, row.sequences)
        for row, degree in zip(rows, dp, strict=True)
    ]
    fitted = fit_memory(stages, [row.peak_bytes for row in rows])
    assert peak_bytes(fitted, stage_of(workload, config.parallel.plan, 0)) == pytest.approx(max(half), rel=0.05)
