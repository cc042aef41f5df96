import numpy as np
import pytest

from megagraph.artifacts import Workload
from megagraph.config import ParallelPlan, UserError
from megagraph.search.fit_memory import fit_memory
from megagraph.search.memory import (
    PRIOR,
    Stage,
    batch_split,
    distinct_rows,
    num_parameters,
    peak_bytes,
    stage_of,
)


def whole(**changes):
    sizes = {"batch": 8, "num_regular": 15, "num_super": 2, "num_readout": 1, "layers": 16, "heads": 8, "hidden": 64}
    sizes |= {"ffn": 64, "bias_channels": 4, "global_tokens": 1, "num_features": 1433, "num_classes": 7}
    return Workload(**{**sizes, **changes})


def test_parameter_counts_of_published_models():
    """ans-gt 2.5: counted from the reference implementation."""
    assert num_parameters(whole(), first=True, last=True, layers=16) == 496_523
    assert num_parameters(whole(num_features=100, num_classes=47), first=True, last=True, layers=16) == 413_811
    cora = whole(hidden=128, ffn=128, bias_channels=6)
    assert num_parameters(cora, first=True, last=True, layers=4) == 583_405


def test_stages_hold_the_model_once_and_the_global_bias_each():
    w = whole()
    parts = [
        num_parameters(w, first=True, last=False, layers=3),
        num_parameters(w, first=False, last=False, layers=6),
        num_parameters(w, first=False, last=True, layers=7),
    ]
    assert sum(parts) == 496_523 + 2 * w.global_tokens * w.bias_channels


def only(name, value=1.0):
    return {**dict.fromkeys(PRIOR, 0.0), "eager_gradients": 0.0, name: value}


def test_states_are_16_bytes_per_parameter_with_gradients_and_scale_with_the_element():
    stage = Stage(whole(), True, True, 16, 1, 1, 1, 8)
    assert peak_bytes(only("constant", 0.0), stage) == 16 * 496_523
    double = Stage(whole(element_bytes=8), True, True, 16, 1, 1, 1, 8)
    assert peak_bytes(only("constant", 0.0), double) == 32 * 496_523


def test_bytes_by_hand():
    """b=8, S=ceil(15/2)+2=10, N=17, d=64, h=8: every regressor once, on top of weights and Adam (12 bytes)."""
    w = whole(layers=4, batch=8)
    inner = Stage(w, False, False, 4, 2, 1, 1, 8)
    states = 16 * num_parameters(w, first=False, last=False, layers=4)
    assert peak_bytes(only("bias"), inner) == states + 4 * 8 * 10 * 17 * (4 + 1)
    assert peak_bytes(only("pipeline"), inner) == states + 2 * 4 * 8 * 10 * 64
    assert peak_bytes(only("bucket"), inner) == states * 1.25
    passing = states * 0.75
    big = 1e4
    assert peak_bytes(only("hidden", big), inner) == passing + big * 4 * 4 * 8 * 10 * 64
    assert peak_bytes(only("statistics", big), inner) == passing + big * 4 * 8 * 10 * (16 + 4 * 8)
    assert peak_bytes(only("ring", big), inner) == passing + big * 8 * 4 * 8 * 10 * 64
    first = Stage(w, True, False, 4, 2, 1, 1, 8)
    more = 12 * num_parameters(w, first=True, last=False, layers=4)
    assert peak_bytes(only("features", big), first) == more + big * 8 * 10 * (4 * 1433 + 8)
    assert peak_bytes(only("table_rows", 100.0), first) == more / 3 * 4 + 100 * 4 * 1433


def test_each_distinct_row_of_a_micro_batch_is_kept_once():
    """Never more rows than tokens or than the table has; a table of unknown size repeats nothing."""
    w = whole(num_rows=3000)
    assert distinct_rows(w, 10.0) == pytest.approx(10.0, rel=0.01)
    assert distinct_rows(w, 1e6) == pytest.approx(3000.0)
    assert distinct_rows(whole(), 1e6) == 1e6
    big = only("features", 100.0)
    one, four = (peak_bytes(big, Stage(w, True, True, 1, 1, 1, k, 4096)) for k in (1, 4))
    states = 12 * num_parameters(w, first=True, last=True, layers=1) + 4 * 3000 * 1433
    tokens = 4096 * 17
    assert one - states == pytest.approx(100 * (3000 * 4 * 1433 + 8 * tokens), rel=1e-3)
    assert four - states == pytest.approx(100 * (4 * 3000 * 4 * 1433 + 8 * tokens), rel=0.01)


def test_dense_scores_are_quadratic_and_tiled_ones_are_not():
    def growth(attention):
        sizes = [
            peak_bytes(dict(PRIOR, eager_gradients=0.0), Stage(w, True, True, 16, 1, 1, 1, 8))
            for w in (whole(num_regular=n, attention=attention, bias_channels=0, global_tokens=0) for n in (1022, 2046))
        ]
        return sizes[1] / sizes[0]

    assert growth("dense") > 3.5
    assert growth("tiled") < 2.1


def test_microbatches_do_not_change_saved_activations():
    w = whole(batch=32)
    one, four = (Stage(w, True, False, 8, 1, 1, k, 32) for k in (1, 4))
    coefficients = {**only("hidden", 1e4)}
    saved = 4 * 8 * 32 * 17 * 64 * 1e4
    assert peak_bytes(coefficients, one) == pytest.approx(
        12 * num_parameters(w, first=True, last=False, layers=8) + saved
    )
    assert peak_bytes(coefficients, four) == peak_bytes(coefficients, one)
    passing = only("transient", 1e6)
    assert peak_bytes(passing, four) < peak_bytes(passing, one)


def test_gradients_that_stay_allocated_add_a_copy_of_the_weights():
    stage = Stage(whole(), True, True, 16, 1, 1, 1, 8)
    lazy, eager = (peak_bytes({**only("hidden", 100.0), "eager_gradients": e}, stage) for e in (0.0, 1.0))
    assert eager - lazy == 4 * 496_523


@pytest.mark.parametrize(
    ("batch", "dp", "k", "expected"), [(64, 2, 4, (8, 32)), (65, 2, 4, (9, 36)), (3, 4, 1, (1, 1))]
)
def test_batch_is_padded_to_equal_microbatches(batch, dp, k, expected):
    assert batch_split(batch, dp, k) == expected


def test_stage_of_plan(workload):
    plan = ParallelPlan(pp=2, cp=2, dp=1, layers=(1, 3), microbatches=4)
    stage = stage_of(workload, plan, 1)
    assert (stage.first, stage.last, stage.layers, stage.local_tokens) == (False, True, 3, 10)
    with pytest.raises(UserError, match=r"stage=2 .* 0\.\.1"):
        stage_of(workload, plan, 2)


def points(coefficients, noise, seed):
    rng = np.random.default_rng(seed)
    stages, sizes = [], []
    for _ in range(150):
        w = whole(
            hidden=int(rng.choice([32, 64, 128])),
            ffn=int(rng.choice([32, 64, 256])),
            heads=int(rng.choice([4, 8, 16])),
            num_regular=int(rng.choice([31, 127, 511])),
            num_features=int(rng.choice([32, 500])),
        )
        place, cp = rng.random(2) < 0.5, int(rng.choice([1, 2, 4]))
        n, k = int(rng.integers(1, 33)), int(rng.choice([1, 4]))
        stages.append(Stage(w, bool(place[0]), bool(place[1]), n, cp, 1, k, int(rng.choice([4, 16, 64]))))
        sizes.append(peak_bytes(coefficients, stages[-1]) * np.exp(noise * rng.standard_normal()))
    return stages, sizes


@pytest.mark.parametrize("eager", [0.0, 1.0])
def test_known_coefficients_are_recovered(true_memory, eager):
    truth = {**true_memory, "eager_gradients": eager}
    stages, sizes = points(truth, 0.0, 1)
    fitted = fit_memory(stages, sizes)
    assert fitted["eager_gradients"] == eager
    for name in ("constant", "table_rows", "hidden", "ffn", "bias"):
        assert fitted[name] == pytest.approx(truth[name], rel=0.05), name


def test_noisy_fit_predicts_points_it_never_saw(true_memory):
    stages, sizes = points(true_memory, 0.03, 2)
    fitted = fit_memory(stages[:50], sizes[:50])
    errors = [abs(peak_bytes(fitted, s) / peak_bytes(true_memory, s) - 1) for s in stages[50:]]
    assert np.mean(errors) < 0.03


def test_directions_without_points_keep_their_expectation(true_memory):
    stages, sizes = points(true_memory, 0.0, 3)
    fitted = fit_memory(stages, sizes)
    assert fitted["scores"] == pytest.approx(PRIOR["scores"])


def test_too_few_points_and_bad_sizes():
    stage = Stage(whole(), True, True, 16, 1, 1, 1, 8)
    with pytest.raises(UserError, match="3 memory points"):
        fit_memory([stage] * 3, [1e6] * 3)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"memory point 2 .* must be positive"):
            fit_memory([stage] * 4, [1e7, 1e7, bad, 1e7])


def test_a_node_table_counts_four_times_on_the_first_stage_and_is_shared_out_where_sharded():
    """Weights, gradient and two moments, but neither bucket nor scratch of the update."""
    heavy = dict.fromkeys(("bucket", "update"), 1.0)
    plain = whole()
    for node_table, rows in (("replicated", 1001), ("sharded", 251)):
        w = whole(num_nodes=1001, node_table=node_table)
        sizes = [peak_bytes({**only("constant"), **heavy}, Stage(x, True, False, 4, 2, 2, 1, 8)) for x in (w, plain)]
        assert sizes[0] - sizes[1] == 16 * rows * 64
        inner = [peak_bytes(only("constant"), Stage(x, False, True, 4, 2, 2, 1, 8)) for x in (w, plain)]
        assert inner[0] == inner[1]
        assert num_parameters(w, first=True, last=True, layers=16) == 496_523 + 1001 * 64


def test_autocast_halves_what_layers_compute_and_adds_a_copy_of_the_weights():
    full, half = (Stage(whole(autocast=a), True, True, 16, 2, 1, 1, 5000) for a in ("none", "bfloat16"))
    weights = 496_523
    for name, factor in {"ffn": 0.5, "keys": 0.5, "ring": 0.5, "hidden": 0.7, "tile": 1.0}.items():
        value = 1e3 if name == "tile" else 1.0
        kept = peak_bytes(only(name, value), full) - 12 * weights
        assert kept > 4 * weights, name
        assert peak_bytes(only(name, value), half) == pytest.approx(14 * weights + factor * kept), name


def test_between_the_passes_of_a_step_gradients_are_kept():
    one, four = (Stage(whole(accumulate=a), True, True, 16, 1, 1, 1, 5000) for a in (1, 4))
    coefficients = only("ffn")
    assert peak_bytes(coefficients, four) - peak_bytes(coefficients, one) == 4 * 496_523


def test_the_known_rows_of_the_feature_table_are_counted_and_another_data_set_is_predicted():
    """Within one data set the table looks like a constant; of the next, with other features, it must not be one."""
    first = Stage(whole(num_rows=500), True, True, 4, 1, 1, 1, 8)
    unknown = Stage(whole(), True, True, 4, 1, 1, 1, 8)
    nothing = only("constant", 0.0)
    assert peak_bytes(nothing, first) - peak_bytes(nothing, unknown) == 4 * 500 * 1433
    later = Stage(whole(num_rows=500), False, True, 4, 1, 1, 1, 8)
    assert peak_bytes(nothing, later) == peak_bytes(nothing, Stage(whole(), False, True, 4, 1, 1, 1, 8))
    truth = {**PRIOR, "constant": 1e5, "eager_gradients": 0.0}

    def stages(features):
        small = whole(num_rows=500, num_features=features, layers=4, hidden=16, ffn=16)
        return [Stage(small, True, True, n, 1, 1, k, b) for n in (1, 2, 4) for k in (1, 2) for b in (2, 8)]

    fitted = fit_memory(stages(1433), [peak_bytes(truth, stage) for stage in stages(1433)])
    for stage in stages(300):
        assert peak_bytes(fitted, stage) == pytest.approx(peak_bytes(truth, stage), rel=0.03)
