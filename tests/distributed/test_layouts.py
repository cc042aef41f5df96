"""Every layout equals the single process: loss, all gradients, three AdamW steps, dropout on (float64)."""

import numpy as np
import pytest
import torch
from problem import Problem, parallel_run, reference

from megagraph.config import ParallelPlan

pytestmark = pytest.mark.distributed

STEPS = 3
PLANS = [
    (ParallelPlan(pp=1, cp=1, dp=1, layers=(4,), microbatches=2), Problem()),
    (ParallelPlan(pp=2, cp=1, dp=1, layers=(1, 3), microbatches=2), Problem()),
    (ParallelPlan(pp=2, cp=1, dp=1, layers=(3, 1), microbatches=4), Problem()),
    (ParallelPlan(pp=1, cp=2, dp=1, layers=(4,), microbatches=1), Problem()),
    (ParallelPlan(pp=1, cp=2, dp=1, layers=(4,), microbatches=2), Problem(readout=7, super_nodes=0, global_tokens=2)),
    (ParallelPlan(pp=1, cp=1, dp=2, layers=(4,), microbatches=2), Problem()),
    (ParallelPlan(pp=2, cp=2, dp=1, layers=(1, 3), microbatches=2), Problem()),
    (ParallelPlan(pp=1, cp=2, dp=2, layers=(4,), microbatches=2), Problem()),
    (ParallelPlan(pp=2, cp=1, dp=2, layers=(3, 1), microbatches=2), Problem()),
    (ParallelPlan(pp=2, cp=2, dp=2, layers=(1, 3), microbatches=2), Problem(readout=7)),
    (ParallelPlan(pp=2, layers=(1, 3), microbatches=4, schedule="1f1b"), Problem()),
    (ParallelPlan(pp=2, cp=2, layers=(3, 1), microbatches=2, schedule="1f1b", recompute=(2, 1)), Problem()),
    (ParallelPlan(cp=2, layers=(4,), microbatches=2, recompute=(4,)), Problem()),
    (ParallelPlan(pp=2, dp=2, layers=(3, 1), microbatches=1), Problem(clip_norm=0.1)),
    (ParallelPlan(pp=1, cp=3, dp=1, layers=(4,), microbatches=1), Problem(regular=2, super_nodes=3, dropout=0.0)),
]


@pytest.mark.parametrize(("plan", "problem"), PLANS, ids=[plan.label.replace(" ", "_") for plan, _ in PLANS])
def test_layout_equals_single_process(run_ranks, plan, problem):
    assert_equals_truth(run_ranks(plan.world_size, parallel_run, problem, plan, STEPS), problem)


def assert_equals_truth(ranks, problem):
    truth = reference(problem, STEPS)
    seen = set()
    for history in ranks:
        for (loss, gradients, weights), (true_loss, true_gradients, true_weights) in zip(history, truth, strict=True):
            assert loss == pytest.approx(true_loss, abs=1e-12)
            for name, gradient in gradients.items():
                seen.add(name)
                expected = true_gradients[name].numpy()
                assert np.abs(gradient - expected).max() <= 1e-12 * (1 + np.abs(expected).max()), name
                # Adam divides rounding by its eps (1e-6 here) where a gradient is zero in exact arithmetic.
                assert np.abs(weights[name] - true_weights[name].numpy()).max() <= 1e-10, name
    assert seen == set(truth[0][1])


@pytest.mark.parametrize(("attention", "exchange"), [("tiled", "allgather"), ("all_to_all", "ring")])
def test_exchanges_equal_single_process(run_ranks, attention, exchange):
    """Context parallelism without a ring, in a pipeline; the last layer of the second computes all rows."""
    problem = Problem(super_nodes=3)
    plan = ParallelPlan(pp=2, cp=2, dp=1, layers=(1, 3), microbatches=2)
    assert_equals_truth(run_ranks(4, parallel_run, problem, plan, STEPS, attention, exchange), problem)


def test_structure_reaches_every_layer():
    """The truth itself depends on what a layout could lose: bias, global distance, dropout."""
    _, gradients, _ = reference(Problem(), 1)[0]
    for layer in range(4):
        assert gradients[f"layers.{layer}.bias_projection.weight"].abs().max() > 1e-6
    assert gradients["distance_gM"].abs().max() > 1e-6
    assert reference(Problem(), 1)[0][0] != reference(Problem(dropout=0.0), 1)[0][0]


def rows_rank(num_ids):
    """Projected rows of a micro-batch of 28 tokens that name `num_ids` rows, and the rows they come out as."""
    from megagraph.graph.batch import SequenceBatch
    from megagraph.parallel.context import ContextShard
    from megagraph.parallel.mesh import make_mesh, process_group

    with process_group(1, "cpu", 60.0):
        mesh = make_mesh(ParallelPlan(layers=(1,)), "cpu", 60.0)
        shard = ContextShard(mesh, Problem(super_nodes=0).layout, "tiled")
        ids = (torch.arange(28) % num_ids).view(4, 7)
        ones = torch.ones(4, 1)
        batch = SequenceBatch(ids, torch.zeros(4, 3, 8, 8), torch.arange(4), ones.long(), ones, torch.arange(4))
        part = shard.microbatch(batch, None)
        rows = part.scope.distinct
        named = part.ids_BT if rows is None else rows.rows_U[part.ids_BT]
        held = 0 if rows is None else sum(tensor is rows.rows_U for tensor in part.tensors())
        return torch.equal(named, ids), None if rows is None else len(rows.rows_U), held


@pytest.mark.parametrize(("num_ids", "expected"), [(5, (True, 5, 1)), (21, (True, 21, 1)), (22, (True, None, 0))])
def test_distinct_rows_are_projected_once_where_that_pays(run_ranks, num_ids, expected):
    assert run_ranks(1, rows_rank, num_ids) == [expected]
