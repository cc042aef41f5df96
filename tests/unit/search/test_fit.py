import numpy as np
import pytest

from megagraph.artifacts import CostModel
from megagraph.config import UserError
from megagraph.search.cost import part_seconds, predict_cell
from megagraph.search.depth import Depth
from megagraph.search.fit import fit, profiled_stage
from megagraph.search.memory import peak_bytes


def test_known_coefficients_are_recovered_from_profile_and_grid(make_profile, make_grid, true_memory, true_latency):
    grid = make_grid()
    cost = fit(make_profile(), grid)
    for row in grid[::17]:
        cell = predict_cell(cost, row)
        assert cell.step_seconds == pytest.approx(float(row["step_seconds"]), rel=0.02)
        assert cell.peak_bytes == pytest.approx(float(row["peak_bytes"]), rel=0.02)
        assert cell.forward_seconds + cell.backward_seconds < cell.step_seconds
    for name in ("constant", "table_rows", "hidden", "bias"):
        assert cost.memory[name] == pytest.approx(true_memory[name], rel=0.1), name
    depth = Depth.read(cost.depth)
    assert (depth.form, depth.l_break) == ("hinge", 8.0)
    assert depth.gamma == pytest.approx(1.68, abs=0.01)
    for name in ("linear", "softmax"):
        assert cost.compute["grid_forward"][name] == pytest.approx(true_latency["grid_forward"][name], rel=0.05), name
    for name in ("layer", "parameter"):
        assert cost.compute["update"][name] == pytest.approx(true_latency["update"][name], rel=0.05), name
    assert cost.quality["memory"].mape_percent < 0.5
    assert cost.quality["latency"].mape_percent < 0.5
    assert cost.quality["latency"].held_out
    assert not cost.quality["latency_in_sample"].held_out
    assert cost.quality["latency"].num_points == 216


def test_noisy_grid_keeps_the_break(make_profile, make_grid):
    cost = fit(make_profile(noise=0.01), make_grid(noise=0.03, seed=4))
    depth = Depth.read(cost.depth)
    assert depth.form == "hinge"
    assert depth.l_break == pytest.approx(8, abs=2)
    assert depth.gamma == pytest.approx(1.68, abs=0.15)
    assert 1 < cost.quality["latency"].mape_percent < 6
    assert cost.quality["memory"].mape_percent < 3


def test_profile_alone_has_no_depth_penalty_and_no_cells(make_profile, make_grid):
    cost = fit(make_profile())
    assert Depth.read(cost.depth) == Depth()
    assert not cost.quality["latency"].held_out
    with pytest.raises(UserError, match="without a grid"):
        predict_cell(cost, make_grid()[0])


def test_affine_law_per_cp_degree(make_profile, workload):
    cost = fit(make_profile())
    for cp, local in ((1, 17), (2, 10), (4, 6)):
        seconds = part_seconds(cost, workload, cp, 50)
        assert seconds["layer_forward"] == pytest.approx(1e-4 + 1e-5 * 50 * local)
        assert seconds["layer_backward"] == pytest.approx(2 * (1e-4 + 1e-5 * 50 * local))


def test_messages_are_sorted_and_monotone(make_profile):
    profile = make_profile()
    first = profile.comm[0]
    bump = first.model_copy(update={"bytes": 2048, "seconds": first.seconds.model_copy(update={"median": 5e-3})})
    cost = fit(profile.model_copy(update={"comm": (*profile.comm, bump)}))
    sizes, seconds = zip(*cost.comm["p2p"], strict=True)
    assert sizes == (1024, 2048, 65536, 1048576)
    assert list(seconds) == sorted(seconds)
    assert seconds[2] == 5e-3
    assert set(cost.comm) == {"p2p", "all_reduce/2", "all_reduce/4"}


def test_validity_is_the_range_of_the_points(make_profile, make_grid):
    cost = fit(make_profile(), make_grid(layers=(2, 32)))
    assert cost.valid["layers"] == (1, 32)
    assert cost.valid["hidden"] == (32, 128)
    assert cost.valid["cp"] == (1, 4)
    assert cost.valid["num_tokens"] == (17, 65)


def test_cost_model_survives_the_disk(make_profile, tmp_path):
    cost = fit(make_profile())
    cost.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == cost


@pytest.mark.parametrize("column", ["forward_seconds", "backward_seconds", "step_seconds", "peak_bytes"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1.0", "0", "", "fast"])
def test_bad_grid_values_are_named(make_profile, make_grid, column, value):
    grid = make_grid()
    grid[5][column] = value
    with pytest.raises(UserError, match=f"grid row 5 has {column}={value!r}"):
        fit(make_profile(), grid)


def test_empty_small_and_broken_grids(make_profile, make_grid):
    with pytest.raises(UserError, match="no rows"):
        fit(make_profile(), [])
    with pytest.raises(UserError, match="3 grid cells"):
        fit(make_profile(), make_grid()[:3])
    grid = make_grid()
    del grid[0]["heads"]
    with pytest.raises(UserError, match="no column 'heads'"):
        fit(make_profile(), grid)
    grid = make_grid()
    grid[1]["hidden"] = "6.5"
    with pytest.raises(UserError, match="no whole number"):
        fit(make_profile(), grid)


def test_too_small_profiles(make_profile):
    profile = make_profile()
    with pytest.raises(UserError, match="no compute rows"):
        fit(profile.model_copy(update={"compute": ()}))
    with pytest.raises(UserError, match="cp=1 was profiled for 1 micro-batch size"):
        fit(profile.model_copy(update={"compute": profile.compute[:1]}))
    with pytest.raises(UserError, match="2 memory points"):
        fit(profile.model_copy(update={"memory": profile.memory[:2]}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_bad_profile_timings_are_named(make_profile, value):
    profile = make_profile()
    broken = profile.compute[0].layer_forward.model_copy(update={"median": value})
    compute = (profile.compute[0].model_copy(update={"layer_forward": broken}), *profile.compute[1:])
    with pytest.raises(UserError, match=r"layer_forward=.* at cp=1, sequences=8"):
        fit(profile.model_copy(update={"compute": compute}))
    message = profile.comm[0].model_copy(update={"seconds": broken})
    with pytest.raises(UserError, match="p2p of 1024 bytes"):
        fit(profile.model_copy(update={"comm": (message, *profile.comm[1:])}))


def test_plans_are_made_with_an_upper_quantile_that_new_points_respect(make_profile, make_grid):
    cost = fit(make_profile(noise=0.02), make_grid(layers=(2, 4, 8, 16)), quantile=0.9)
    new = make_profile(noise=0.02, seed=7)
    assert 1.0 < cost.memory_margin < 1.1
    assert cost.memory_margin == cost.intervals["memory"].upper["0.9"]
    planned = [cost.memory_margin * peak_bytes(cost.memory, profiled_stage(new, row)) for row in new.memory]
    above = np.mean([row.peak_bytes > size for row, size in zip(new.memory, planned, strict=True)])
    assert above < 0.2
    assert cost.quality["memory"].exceeded_percent == pytest.approx(10, abs=6)
    assert cost.quality["memory"].false_feasible_percent < 5
    assert cost.intervals["memory"].num_points == cost.quality["memory"].num_points == len(new.memory) + 144
    low, high = cost.intervals["memory"].lower["0.1"], cost.intervals["memory"].upper["0.9"]
    assert low < 1 < high


def test_a_higher_quantile_asks_for_more(make_profile):
    profile = make_profile(noise=0.03)
    margins = [fit(profile, quantile=quantile).memory_margin for quantile in (0.5, 0.8, 0.95)]
    assert margins == sorted(margins)
    assert margins[0] < margins[2]
    with pytest.raises(UserError, match=r"quantile=1\.0 must be"):
        fit(profile, quantile=1.0)


def test_memory_is_also_predicted_for_degrees_and_places_that_were_left_out(make_profile):
    quality = fit(make_profile()).quality
    for name in ("memory/cp", "memory/stage"):
        assert quality[name].held_out
        assert quality[name].num_points == quality["memory"].num_points
        assert quality[name].mape_percent < 15
    assert "memory/cp" not in fit(make_profile(degrees=(1,))).quality


def test_both_readings_of_the_depth_are_kept_with_intervals(make_profile, make_grid):
    cost = fit(make_profile(), make_grid(noise=0.03, seed=4))
    assert set(cost.depth_readings) == {"none", "hinge", "jump"}
    hinge, jump = cost.depth_readings["hinge"], cost.depth_readings["jump"]
    assert hinge.left_out_mape_percent < jump.left_out_mape_percent < cost.depth_readings["none"].left_out_mape_percent
    assert hinge.l_break_interval[0] <= 8 <= hinge.l_break_interval[1]
    assert hinge.gamma_interval[0] <= 1.68 <= hinge.gamma_interval[1]
    assert hinge.gamma_interval[1] - hinge.gamma_interval[0] < 0.3
    assert (cost.depth["l_break"], cost.depth["gamma"]) == (hinge.l_break, hinge.gamma)
    assert fit(make_profile()).depth_readings == {}


def test_a_grid_of_another_device_is_refused(make_profile, make_grid):
    grid = [row | {"device": "gpu x"} for row in make_grid()]
    with pytest.raises(UserError, match="grid was measured on gpu x but the profile on cpu: measure both"):
        fit(make_profile(), grid)
