"""Predicted memory is the tracked memory of the same step, to the byte, on every rank of every kind of layout, where
every token is projected by itself; distinct rows projected once take no more."""

import os
import re

import pytest
from engine_case import write_planted

from megagraph.artifacts_memory import MemoryPrediction
from megagraph.config import ParallelPlan, RunConfig, UserError
from megagraph.graph.sizes import GraphSizes

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    write_planted(folder)
    return folder


def workload(model=None, sampling=None, train=None, parallel=None, device="cpu"):
    body = {
        "id": "small",
        "dataset": "small",
        "device": device,
        "model": {"heads": 2, "hidden": 8, "ffn": 8, "bias_channels": 2, **(model or {})},
        "sampling": {"num_sampled": 5, **(sampling or {})},
        "train": {"batch": 18, **(train or {})},
        "parallel": {"timeout_seconds": 60.0, **(parallel or {})},
    }
    return RunConfig.model_validate(body).workload


NO_DROPOUT = {"input_dropout": 0.0, "residual_dropout": 0.0, "attention_dropout": 0.0}
UNION = {"builder": "union", "seeds_per_sequence": 7, "num_sampled": 1}
LONG = {"builder": "union", "seeds_per_sequence": 60, "num_sampled": 1, "super_set": "all"}
CASES = {
    "one rank": ({"layers": [2]}, {}),
    "float64, no dropout": ({"layers": [2], "microbatches": 3}, {"train": {"dtype": "float64"}, "model": NO_DROPOUT}),
    "dense": ({"layers": [2]}, {"parallel": {"attention": "dense"}}),
    "recompute": ({"layers": [2], "microbatches": 2, "recompute": [1]}, {}),
    "many tiles": ({"layers": [1]}, {"sampling": LONG, "train": {"batch": 120}, "model": {"heads": 64, "hidden": 64}}),
    "dp2": ({"dp": 2, "layers": [2]}, {}),
    "cp2 ring": ({"cp": 2, "layers": [2]}, {}),
    "cp2 allgather": ({"cp": 2, "layers": [2]}, {"parallel": {"exchange": "allgather"}}),
    "cp2 all_to_all": ({"cp": 2, "layers": [2]}, {"parallel": {"attention": "all_to_all"}}),
    "cp2 union": ({"cp": 2, "layers": [2], "microbatches": 2}, {"sampling": UNION}),
    "cp3 ragged": ({"cp": 3, "layers": [1]}, {"sampling": {"num_sampled": 6}}),
    "pp2 gpipe": ({"pp": 2, "layers": [1, 3], "microbatches": 4}, {}),
    "pp2 1f1b": ({"pp": 2, "layers": [3, 1], "microbatches": 4, "schedule": "1f1b"}, {}),
    "pp2 dp2": ({"pp": 2, "dp": 2, "layers": [1, 1], "microbatches": 2}, {}),
    "pp2 cp2": ({"pp": 2, "cp": 2, "layers": [1, 1], "microbatches": 2, "recompute": [0, 1]}, {}),
}


def both(config, plan, data):
    """Predicted, then tracked bytes of this rank without, then with distinct rows projected once."""
    from megagraph.parallel import context
    from megagraph.parallel.mesh import process_group
    from megagraph.profile.bench import Bench
    from megagraph.profile.predict import predict_rank
    from megagraph.train.engine import load_data

    predicted = predict_rank(config, GraphSizes.read(data, "default"), plan, int(os.environ["RANK"]))
    usual = context.DISTINCT_PAYS
    tracked = []
    with process_group(plan.world_size, "cpu", 60.0):
        for context.DISTINCT_PAYS in (0.0, usual):
            bench = Bench.build(config, load_data(data, "default"), plan, config.batch // config.sampling.samples)
            # A message that a busy machine delivers late keeps its buffer longer: the least of a few counts.
            tracked.append(min(bench.peak()[0] for _ in range(3)))
    return predicted.peak_bytes, *tracked


@pytest.mark.parametrize("name", CASES)
def test_predicted_is_tracked(run_ranks, data, name):
    body, options = CASES[name]
    plan = ParallelPlan.model_validate(body)
    config = workload(**{**options, "model": {"layers": sum(plan.layers), **options.get("model", {})}})
    found = run_ranks(plan.world_size, both, config, plan, data)
    for predicted, each, distinct in found:
        assert predicted == each
        assert distinct <= predicted * 1.02  # ids of few features may outweigh them


def predicted(config, sizes, plan):
    from megagraph.profile.predict import predict_plan

    return predict_plan(config, sizes, plan)


def test_a_table_of_learned_rows_is_not_predicted(run_ranks):
    sizes = GraphSizes(num_nodes=100, num_super=10, num_features=8, num_classes=3)
    config = workload(model={"layers": 2, "node_embedding": True})
    assert "node_embedding=true" in run_ranks(1, refused, config, sizes, ParallelPlan(layers=(2,)))[0]


def refused(config, sizes, plan):
    with pytest.raises(UserError) as caught:
        predicted(config, sizes, plan)
    return str(caught.value)


def test_nothing_is_allocated_and_no_rank_is_missed(run_ranks):
    """A table of two terabytes for a thousand ranks, as seen from this machine."""
    plan = ParallelPlan(pp=2, dp=250, cp=2, layers=(1, 1))
    sizes = GraphSizes(num_nodes=10**9, num_super=10**6, num_features=512, num_classes=7)
    (result,) = run_ranks(1, predicted, workload(model={"layers": 2}, train={"batch": 500}), sizes, plan)
    assert len(result.ranks) == 1000
    assert all(rank.parts["features"] == 4 * 512 * (10**9 + 10**6) for rank in result.ranks[:500])
    assert all(rank.parts["features"] == 0 for rank in result.ranks[500:])
    assert all(sum(rank.parts.values()) == rank.peak_bytes for rank in result.ranks)


def test_cuda_has_its_own_tiles_optimiser_and_granules(run_ranks):
    sizes, plan = GraphSizes(120, 12, 8, 3), ParallelPlan(layers=(1,))
    model = {"layers": 1, "heads": 32, "hidden": 32}
    sampling = {"builder": "union", "seeds_per_sequence": 8, "num_sampled": 7}
    options = {"model": model, "sampling": sampling, "train": {"batch": 1024}, "parallel": {"backend": "flex"}}
    host, device = (run_ranks(1, predicted, workload(**options, device=d), sizes, plan)[0] for d in ("cpu", "cuda"))
    assert device.peak_bytes % 512 == 0
    assert device.peak_bytes > host.peak_bytes + (2 << 20)


def verb(*arguments):
    from megagraph.cli import main

    return main([str(argument) for argument in arguments])


def test_the_verb_writes_every_rank(run_ranks, data, tmp_path):
    config = workload(model={"layers": 2})
    (tmp_path / "w.json").write_text(config.model_dump_json())
    call = ["memory", tmp_path / "w.json", "--data", data, "--out", tmp_path / "memory.json"]
    plan = ParallelPlan(dp=2, layers=(2,))
    assert run_ranks(1, verb, *call, "--plan", plan.model_dump_json()) == [0]
    found = MemoryPrediction.load(tmp_path / "memory.json")
    (one,) = found.plans
    assert (found.workload, found.device, one.plan) == ("small", "cpu", plan)
    assert one.ranks[0] == one.ranks[1]
    assert one.peak_bytes == one.ranks[0].peak_bytes > 4 * one.ranks[0].parts["weights"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "has plan: search: give --plan"),
        (["--plan", "{"], "--plan is not JSON"),
        (["--plan", '{"layers": [3]}'], r"layers=\[3\] sum to 3 but model.layers=4"),
        (["--plan", '{"pp": 2, "layers": [4]}'], "give one count per stage"),
    ],
)
def test_a_plan_that_is_none_is_one_line(data, tmp_path, capsys, options, words):
    (tmp_path / "w.json").write_text(workload().model_dump_json())
    assert verb("memory", tmp_path / "w.json", "--data", data, "--out", tmp_path / "memory.json", *options) == 2
    assert re.fullmatch(f"megagraph: error: .*{words}.*\n", capsys.readouterr().err)
    assert not (tmp_path / "memory.json").exists()
