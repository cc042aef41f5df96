"""Several passes to a step: the numbers of one pass, in every layout, in less memory."""

import csv
from itertools import product

import engine_case
import pytest

from megagraph.artifacts import RunSummary
from megagraph.config import ParallelPlan, RunConfig
from megagraph.graph.store import save_coarsening, save_graph

pytestmark = pytest.mark.distributed

LAYOUTS = [
    (ParallelPlan(layers=(4,)), 3),
    (ParallelPlan(dp=2, layers=(4,), microbatches=2), 3),
    (ParallelPlan(pp=2, layers=(1, 3), microbatches=2, schedule="1f1b"), 2),
    (ParallelPlan(pp=2, cp=2, layers=(3, 1), microbatches=2, recompute=(1, 0)), 4),
]


@pytest.fixture(scope="module")
def data():
    return engine_case.make_data()


@pytest.mark.parametrize(("plan", "accumulate"), LAYOUTS, ids=[f"{p.label} a{a}" for p, a in LAYOUTS])
def test_a_step_in_parts_is_the_step(run_ranks, data, plan, accumulate):
    """A full step and a short one whose last passes have nothing to do; clipped once, by the norm of the whole."""
    kinds = product((engine_case.CENTRES, 7), (engine_case.EGO, engine_case.UNION), (None, 0.05))
    cases = [(count, {"sampling": sampling, "clip_norm": clip}) for count, sampling, clip in kinds]
    truth = run_ranks(1, engine_case.steps, data, ParallelPlan(layers=(4,)), cases)[0]
    cases = [(count, {**settings, "accumulate": accumulate}) for count, settings in cases]
    for rank in run_ranks(plan.world_size, engine_case.steps, data, plan, cases):
        for (loss, gradients, _), (true_loss, true_gradients, _) in zip(rank, truth, strict=True):
            assert loss == pytest.approx(true_loss, abs=1e-12)
            engine_case.assert_close(gradients, true_gradients, 1e-12)


def peak_rank(data, accumulate):
    """Peak of live bytes of a second step, its passes made when they are asked for."""
    from megagraph.parallel.mesh import make_mesh, process_group
    from megagraph.train.meters import LiveBytes

    with process_group(1, "cpu", 60.0):
        mesh = make_mesh(ParallelPlan(layers=(4,), microbatches=2), "cpu", 60.0)
        engine = engine_case.make_engine(data, mesh, accumulate=accumulate)
        makers = engine.step_makers(engine_case.centres(96), 96, 1, 2, 7)
        engine.train_step((make() for make in makers), 192.0)
        engine.optimizer.zero_grad(set_to_none=True)
        with LiveBytes() as live:
            live.track(engine.tensors())
            engine.train_step((make() for make in makers), 192.0)
        return live.peak, sum(tensor.nbytes for tensor in engine.tensors())


def test_memory_falls(run_ranks, data):
    (one, kept), (four, _) = (run_ranks(1, peak_rank, data, accumulate)[0] for accumulate in (1, 4))
    assert four - kept < 0.4 * (one - kept), "a quarter of the activations, and all gradients"


def train_rank(run, data, out):
    from megagraph.train.trainer import train

    train(run, data, out)


def losses(out):
    with (out / "epochs.csv").open() as handle:
        return [(float(row["loss"]), row["val_accuracy"]) for row in csv.DictReader(handle)]


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_run_in_parts_is_the_run(run_ranks, data, tmp_path, prefetch):
    """Shuffled steps, the loader thread, evaluation in passes; another layout."""
    save_graph(data.graph, tmp_path / "graph.safetensors")
    save_coarsening(data.coarsening, tmp_path / "default.safetensors")

    def config(plan, ranks, accumulate):
        return RunConfig.model_validate(
            {
                "id": "small",
                "dataset": "small",
                "model": {"layers": 4, "heads": 2, "hidden": 8, "ffn": 8, "bias_channels": 2},
                "sampling": {"num_sampled": 4, "eval_samples": 2, "samples": 2},
                "train": {
                    "batch": 30, "epochs": 3, "peak_lr": 1e-2, "warmup_epochs": 1, "dtype": "float64",
                    "accumulate": accumulate, "prefetch": prefetch,
                },
                "parallel": {"world_size": ranks, "plan": plan, "timeout_seconds": 60.0},
            }
        )  # fmt: skip

    run_ranks(1, train_rank, config({"layers": [4]}, 1, 1), tmp_path, tmp_path / "whole")
    run_ranks(2, train_rank, config({"pp": 2, "layers": [1, 3]}, 2, 4), tmp_path, tmp_path / "parts")
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert [loss for loss, _ in parts] == pytest.approx([loss for loss, _ in whole], abs=1e-10)
    assert [accuracy for _, accuracy in parts] == [accuracy for _, accuracy in whole]
    summaries = [RunSummary.load(tmp_path / name / "summary.json") for name in ("whole", "parts")]
    assert [summary.accumulate for summary in summaries] == [1, 4]
    assert summaries[0].sequences_per_step == summaries[1].sequences_per_step


def bench_rank(data, accumulate):
    """(sequences of the bench, its peak, sizes for the cost model) of a workload of batch 64."""
    from megagraph.parallel.mesh import process_group
    from megagraph.profile.bench import Bench, workload_of

    config = RunConfig.model_validate(
        {
            "id": "small",
            "dataset": "small",
            "model": {"layers": 2, "heads": 2, "hidden": 64, "ffn": 64, "bias_channels": 2},
            "sampling": {"num_sampled": 4, "samples": 2},
            "train": {"batch": 32 * accumulate, "accumulate": accumulate},
        }
    ).workload
    with process_group(1, "cpu", 60.0):
        plan = ParallelPlan(layers=(2,))
        bench = Bench.build(config, data, plan, config.batch // config.sampling.samples)
        sequences = sum(len(part.ids_BT) for part in bench.microbatches)
        return sequences, bench.peak()[0], workload_of(config, data, bench.engine)


def test_what_is_profiled_is_a_pass_beside_gradients(run_ranks, data):
    """Two workloads of equal passes: the second holds gradients while it runs its forwards."""
    from megagraph.search.memory import PRIOR, num_parameters, peak_bytes, stage_of

    (one, peak, first), (same, later, second) = (run_ranks(1, bench_rank, data, a)[0] for a in (1, 4))
    assert one == same == first.batch == second.batch == 64
    weights = 4 * num_parameters(first, first=True, last=True, layers=2)
    assert 0.5 * weights < later - peak <= 1.1 * weights, "at the first peak backward has made some of them"
    plan = ParallelPlan(layers=(2,))
    coefficients = {**PRIOR, "eager_gradients": 0.0}
    predicted = [peak_bytes(coefficients, stage_of(sizes, plan, 0)) for sizes in (first, second)]
    assert predicted[1] - predicted[0] == pytest.approx(weights)
