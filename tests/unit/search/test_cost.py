import pytest

from megagraph.config import ParallelPlan, UserError
from megagraph.search.cost import (
    LAYER_TERMS,
    all_reduce_seconds,
    last_layer_factor,
    layer_terms,
    outside,
    p2p_seconds,
    part_seconds,
)
from megagraph.search.depth import Depth
from megagraph.search.fit import fit
from megagraph.search.memory import num_parameters, peak_bytes, stage_of
from megagraph.search.stages import predict_memory, predict_step

PLAN = ParallelPlan(pp=2, cp=1, dp=2, layers=(1, 3), microbatches=4)


@pytest.fixture
def cost(make_profile):
    fitted = fit(make_profile())
    update = {"update": {"fixed": 1e-4, "layer": 2e-4, "parameter": 1e-9}}
    depth = Depth("hinge", 2.0, 1.5).stored()
    return fitted.model_copy(update={"compute": {**fitted.compute, **update}, "depth": depth})


def test_step_equals_a_simulation_put_together_by_hand(cost, workload, simulate):
    micro = 8  # 64 sequences over dp=2 and K=4
    part = part_seconds(cost, workload, 1, micro)
    ending = 3.5 * last_layer_factor(workload, 1, 3)
    f = [part["layer_forward"] + part["embed_forward"], ending * part["layer_forward"] + part["head_forward"]]
    b = [part["layer_backward"] + part["embed_backward"], ending * part["layer_backward"] + part["head_backward"]]
    a = []
    for first, n in ((True, 1), (False, 3)):
        size = num_parameters(workload, first=first, last=not first, layers=n)
        a.append(1e-4 + 2e-4 * n + 1e-9 * size + all_reduce_seconds(cost, 2, 4 * size))
    link = p2p_seconds(cost, micro * 17 * 64 * 4)
    assert predict_step(cost, workload, PLAN) == pytest.approx(simulate(f, b, a, 4, link, link), rel=1e-12)


def test_padding_costs_as_much_as_sequences(cost, workload):
    odd = workload.model_copy(update={"batch": 57})
    assert predict_step(cost, odd, PLAN) == predict_step(cost, workload, PLAN)
    assert predict_memory(cost, odd, PLAN, 0) == predict_memory(cost, workload, PLAN, 0)
    less = workload.model_copy(update={"batch": 56})
    assert predict_step(cost, less, PLAN) < predict_step(cost, workload, PLAN)


def test_memory_is_that_of_the_stage(cost, workload):
    for stage in (0, 1):
        assert predict_memory(cost, workload, PLAN, stage) == peak_bytes(cost.memory, stage_of(workload, PLAN, stage))


def test_another_shape_scales_the_layer_but_not_its_fixed_cost(cost, workload):
    wide = workload.model_copy(update={"hidden": 128, "ffn": 128})
    fixed = part_seconds(cost, workload, 1, 0)["layer_forward"]
    assert part_seconds(cost, wide, 1, 0)["layer_forward"] == fixed
    ratio = (part_seconds(cost, wide, 1, 10)["layer_forward"] - fixed) / (
        part_seconds(cost, workload, 1, 10)["layer_forward"] - fixed
    )
    assert 2 < ratio < 4
    deep = workload.model_copy(update={"layers": 12})
    assert part_seconds(cost, deep, 1, 10) == part_seconds(cost, workload, 1, 10)


def test_grid_weights_rescale_another_shape(make_profile, make_grid, true_latency, workload):
    """At the grid's own N: one N cannot tell score products from the per-element work they are proportional to."""
    profiled = workload.model_copy(update={"num_regular": 63})
    cost = fit(make_profile(profiled), make_grid(layers=(2, 4, 8), depth=Depth()))
    other = profiled.model_copy(update={"hidden": 128, "ffn": 128, "heads": 16})
    weights = true_latency["grid_forward"]

    def work(w):
        terms = zip(LAYER_TERMS[1:], layer_terms(w, 1, 1.0)[1:], strict=True)
        return sum(weights[name] * value for name, value in terms)

    slope = part_seconds(cost, other, 1, 1)["layer_forward"] - part_seconds(cost, other, 1, 0)["layer_forward"]
    assert slope == pytest.approx(1e-5 * 65 * work(other) / work(profiled), rel=0.01)


def test_messages_between_beyond_and_in_unknown_groups(cost):
    assert p2p_seconds(cost, 10) == p2p_seconds(cost, 1024)
    assert p2p_seconds(cost, 65536) < p2p_seconds(cost, 300_000) < p2p_seconds(cost, 1048576)
    assert p2p_seconds(cost, 4 * 1048576) == pytest.approx(4 * p2p_seconds(cost, 1048576))
    assert all_reduce_seconds(cost, 1, 1e6) == 0
    assert all_reduce_seconds(cost, 8, 1e6) == pytest.approx(all_reduce_seconds(cost, 4, 1e6) * (7 / 8) / (3 / 4))


def test_what_was_not_profiled_is_refused(cost, workload):
    with pytest.raises(UserError, match=r"cp=3 was not profiled \(profiled: 1, 2, 4\)"):
        predict_step(cost, workload, ParallelPlan(cp=3, layers=(4,)))
    bare = cost.model_copy(update={"comm": {}})
    with pytest.raises(UserError, match="no p2p time"):
        predict_step(bare, workload, ParallelPlan(pp=2, layers=(1, 3)))
    with pytest.raises(UserError, match="no all_reduce time"):
        predict_step(bare, workload, ParallelPlan(dp=2, layers=(4,)))
    assert predict_step(bare, workload, ParallelPlan(layers=(4,))) > 0


def test_impossible_plans_are_refused(cost, workload):
    with pytest.raises(UserError, match="sum to 3"):
        predict_step(cost, workload, ParallelPlan(layers=(3,)))
    dense = workload.model_copy(update={"attention": "dense"})
    with pytest.raises(UserError, match="attention=dense cannot be sharded over cp=2"):
        predict_memory(cost, dense, ParallelPlan(cp=2, layers=(4,)), 0)
    short = workload.model_copy(update={"num_regular": 1})
    with pytest.raises(UserError, match="cp=2 exceeds the 1 regular"):
        predict_step(cost, short, ParallelPlan(cp=2, layers=(4,)))


def test_extrapolation_is_named(cost, workload):
    assert outside(cost, workload, PLAN) == []
    wide = workload.model_copy(update={"hidden": 128, "layers": 40})
    plan = ParallelPlan(pp=2, layers=(10, 30), microbatches=4)
    assert outside(cost, wide, plan) == ["layers=30 not in 1..4", "hidden=128 not in 64..64"]


def test_the_last_layer_costs_its_keys_and_the_rows_read_out(workload):
    """Hand count for one of 17 tokens read out; all tokens read out, or exchanged by heads, cost a whole layer."""
    d, f, N = workload.hidden, workload.ffn, workload.num_tokens
    query = 4 * d * d + 4 * d * f + N * (4 * d + 2 * workload.bias_channels * workload.heads)
    query += 80 * workload.heads * N + 40 * (d + f)
    share = (17 * 4 * d * d + query) / (17 * (4 * d * d + query))
    assert last_layer_factor(workload, 1, 1) == pytest.approx(share)
    assert last_layer_factor(workload, 1, 4) == pytest.approx((3 + share) / 4)
    everything = workload.model_copy(update={"attention": "all_to_all"})
    assert last_layer_factor(everything, 1, 4) == 1.0
