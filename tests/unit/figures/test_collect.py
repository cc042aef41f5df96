"""The frames that figures are drawn from, by value, and the one-line errors for missing or broken inputs."""

import numpy as np
import pandas as pd
import pytest

from megagraph.artifacts import CostModel
from megagraph.config import FigureConfig, ParallelPlan, UserError
from megagraph.figures import fig08b, fig09a, fig09b, fig10, table01
from megagraph.figures.data import mape_percent, r_squared, strategy_of
from megagraph.figures.registry import make as make_figure
from megagraph.files import write_csv

SEARCH = FigureConfig(search="demo")


def test_fig8b_keeps_evaluated_epochs_and_smooths_over_a_tenth(results, make):
    make.write_run(results, make.summary("long", make.plan(1, 1, 1, (4,))), epochs=100)
    frame = fig08b.collect(results, FigureConfig(runs=("long", "gcn")))
    assert frame.groupby("run")["epoch"].count().to_dict() == {"long": 50, "gcn": 20}
    assert set(frame["epoch"] % 2) == {0}
    assert dict(zip(frame["run"], frame["system"], strict=True)) == {"long": "megagraph", "gcn": "gcn"}
    long = frame[frame["run"] == "long"].reset_index()
    assert set(long["window"]) == {5}
    raw = pd.read_csv(results / "train" / "long" / "epochs.csv")["test_accuracy"].dropna().to_numpy() * 100
    np.testing.assert_allclose(long["test_percent"], raw)
    assert long["smoothed_percent"][10] == pytest.approx(raw[8:13].mean())
    assert long["smoothed_percent"][0] == pytest.approx(raw[:3].mean())


def test_fig9a_takes_measured_bytes_and_the_models_prediction(results, make, law):
    frame = fig09a.collect(results, SEARCH)
    assert len(frame) == 216
    measured = {
        tuple(row[k] for k in ("batch", "layers", "heads", "hidden")): row["peak_bytes"] for row in make.grid_rows()
    }
    cell = frame.sample(1, random_state=1).iloc[0]
    key = (cell["batch"], cell["layers"], cell["heads"], cell["hidden"])
    assert cell["measured_bytes"] == measured[key]
    assert cell["predicted_bytes"] == make.true_bytes(*key)
    assert cell["error_percent"] == pytest.approx((make.true_bytes(*key) / measured[key] - 1) * 100)
    assert frame["mape_percent"].iloc[0] == pytest.approx(frame["error_percent"].abs().mean())
    assert 0.99 < frame["r2"].iloc[0] < 1


def test_held_out_cells_stand_apart_in_both_figures(results, make, law):
    rows = make.grid_rows(depths=(6, 40))
    write_csv(results / "search" / "demo" / "heldout-0.csv", rows)
    frame = fig09a.collect(results, SEARCH)
    own = frame[frame["held_out"]]
    assert (len(frame), len(own)) == (216 + 72, 72)
    assert own["heldout_mape_percent"].iloc[0] == pytest.approx(own["error_percent"].abs().mean())
    assert frame["mape_percent"].iloc[0] == pytest.approx(frame.loc[~frame["held_out"], "error_percent"].abs().mean())
    shapes = [line.get_marker() for line in fig09a.draw(frame).axes[0].get_lines()]
    assert shapes.count("^") == 2
    lines = fig09b.collect(results, SEARCH)
    assert lines["kind"].value_counts().to_dict() == {"measured": 216, "held-out": 72, "fitted": 31}
    assert lines["heldout_r2"].iloc[0] > 0.98
    assert "^" in [line.get_marker() for line in fig09b.draw(lines).axes[0].get_lines()]


def test_without_held_out_cells_their_columns_are_empty(results, law):
    frame = fig09a.collect(results, SEARCH)
    assert not frame["held_out"].any()
    assert frame["heldout_mape_percent"].isna().all()
    assert "^" not in [line.get_marker() for line in fig09a.draw(frame).axes[0].get_lines()]


def test_estimates_are_not_drawn_beside_measurements(results, law):
    cost = CostModel.load(results / "search" / "demo" / "cost.json")
    cost.model_copy(update={"estimated_from": "cpu x2"}).save(results / "search" / "demo" / "cost.json")
    with pytest.raises(UserError, match=r"cost.json: estimated from cpu x2"):
        fig09a.collect(results, SEARCH)


def test_quality_numbers_are_the_textbook_ones():
    measured, predicted = np.array([1.0, 2.0, 4.0]), np.array([1.1, 1.8, 4.0])
    assert mape_percent(measured, predicted) == pytest.approx((10 + 10 + 0) / 3)
    assert r_squared(measured, predicted) == pytest.approx(1 - 0.05 / (14 / 3))
    assert np.isnan(r_squared(np.ones(3), predicted))


def test_fig9b_divides_by_the_groups_predicted_time_at_the_shallowest_depth(results, make, law):
    frame = fig09b.collect(results, SEARCH)
    measured, fitted = frame[frame["kind"] == "measured"], frame[frame["kind"] == "fitted"]
    assert len(measured) == 216 and fitted["layers"].tolist() == list(range(2, 33))
    row = measured.iloc[100]
    reference = make.true_seconds(row["batch"], 2, row["heads"], row["hidden"])
    assert row["relative"] == pytest.approx(row["seconds"] / reference)
    assert fitted["relative"].iloc[0] == 1
    slopes = np.diff(fitted["relative"])
    assert slopes[10] / slopes[2] == pytest.approx(make.gamma, rel=1e-3)
    assert (fitted["low"] <= fitted["relative"]).all() and (fitted["relative"] <= fitted["high"]).all()
    assert frame["form"].iloc[0] == "hinge"
    assert (frame["l_break"].iloc[0], frame["gamma"].iloc[0]) == (make.l_break, make.gamma)


def test_fig10_marks_pick_frontier_optimum_and_keeps_measured_apart(results, make):
    search = make.write_search(results)
    frame = fig10.collect(results, SEARCH)
    estimated, measured = frame[frame["source"] == "estimated"], frame[frame["source"] == "measured"]
    assert len(estimated) == len(search.candidates)
    assert estimated.loc[estimated["pick"], "label"].tolist() == [search.best.plan.label]
    assert set(estimated.loc[estimated["frontier"], "label"]) == {plan.plan.label for plan in search.frontier}
    pick = estimated[estimated["pick"]].iloc[0]
    assert pick["seconds"] == pytest.approx(search.best.step_seconds / 256)
    assert pick["peak_bytes"] == pytest.approx(search.best.peak_bytes)
    assert measured["optimum"].sum() == 1 and not estimated["optimum"].any()
    usable = measured[(measured["status"] == "ok") & (measured["peak_bytes"] <= search.limit_bytes)]
    assert measured.loc[measured["optimum"], "seconds"].iloc[0] == usable["seconds"].min()
    lost = measured[measured["status"] == "oom"]
    assert len(lost) == 1 and not lost["fits"].any() and lost["seconds"].notna().all()
    assert set(frame["strategy"]) == {"PP", "CP", "DP", "PP+CP", "PP+DP", "CP+DP"}
    assert frame["search_seconds"].iloc[0] == 0.012 and frame["limit_bytes"].iloc[0] == 3e7


def test_fig10_draws_frontier_and_pick_that_a_large_search_left_out_of_its_candidates(results, make):
    search = make.write_search(results)
    search.model_copy(update={"candidates": search.candidates[:1]}).save(results / "search" / "demo" / "search.json")
    estimated = fig10.collect(results, SEARCH).query("source == 'estimated'")
    assert set(estimated.loc[estimated["frontier"], "label"]) == {plan.plan.label for plan in search.frontier}
    assert estimated["pick"].sum() == 1


@pytest.mark.parametrize(
    ("degrees", "name"),
    [((1, 1, 1), "single"), ((2, 1, 1), "PP"), ((1, 4, 1), "CP"), ((2, 1, 2), "PP+DP"), ((2, 2, 2), "PP+CP+DP")],
)
def test_strategy_names(degrees, name):
    assert strategy_of(*degrees) == name


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ((2, 2), "PP, even"),
        ((2, 3), "PP, even"),
        ((1, 3), "PP, uneven"),
        ((1, 2, 1), "PP, even"),
        ((2, 3, 1), "PP, uneven"),
    ],
)
def test_a_pipeline_is_even_if_the_sum_does_not_allow_a_smaller_difference(layers, name):
    assert table01.strategy_name(ParallelPlan(pp=len(layers), layers=layers)) == name


def test_table1_rows_ratios_and_best(results):
    frame = table01.collect(results, FigureConfig(runs=("single", "cp", "even", "uneven")))
    assert frame["strategy"].tolist() == ["single", "CP", "PP, even", "PP, uneven"]
    np.testing.assert_allclose(frame["time_ratio"], [1, 2.5 / 4, 0.75, 0.55])
    np.testing.assert_allclose(frame["memory_ratio"], [1, 0.4, 0.75, 0.525])
    np.testing.assert_allclose(frame["mem1_gb"], [np.nan, 0.016, 0.012, 0.02])
    assert frame["run"][frame["best_time"]].tolist() == ["uneven"]
    assert frame["run"][frame["best_memory"]].tolist() == ["cp"]
    assert frame["layers"].tolist() == ["4", "4", "2;2", "1;3"]


def test_table1_shows_a_run_out_of_memory_and_never_calls_it_best(results, make):
    make.write_run(results, make.summary("lost", make.plan(1, 1, 2, (4,)), status="oom", seconds=0.0, peak=(1, 1)))
    frame = table01.collect(results, FigureConfig(runs=("lost", "cp")))
    assert frame["run"][frame["best_time"]].tolist() == ["cp"] == frame["run"][frame["best_memory"]].tolist()
    assert frame["time_ratio"].isna().all()
    texts = table01.texts(frame)
    assert "OOM" in texts[".md"] and "OOM" in texts[".tex"]


def _without(folder, name):
    (folder / name).unlink()


BROKEN = [
    ("fig8b", lambda r: _without(r / "config/figure", "fig8b.json"), "config/figure/fig8b.json", "resolve"),
    ("fig8b", lambda r: _without(r / "train/gcn", "summary.json"), "train/gcn/summary.json", "train"),
    ("fig8b", lambda r: _without(r / "train/gcn", "epochs.csv"), "train/gcn/epochs.csv", "train"),
    ("fig8b", lambda r: (r / "train/gcn/epochs.csv").write_text(""), "train/gcn/epochs.csv", "not a CSV table"),
    (
        "fig8b",
        lambda r: (r / "train/gcn/epochs.csv").write_text("epoch,loss\n1,2\n"),
        "epochs.csv",
        "lacks column seconds",
    ),
    ("fig9a", lambda r: [path.unlink() for path in r.glob("search/demo/grid-*.csv")], "grid-*.csv", "profile --grid"),
    ("fig9a", lambda r: _without(r / "search/demo", "cost.json"), "search/demo/cost.json", "fit"),
    ("fig9b", lambda r: (r / "search/demo/cost.json").write_text("{}"), "cost.json", "schema"),
    ("fig10", lambda r: _without(r / "search/demo", "search.json"), "search/demo/search.json", "search"),
    ("fig10", lambda r: _without(r / "search/demo", "plans.csv"), "search/demo/plans.csv", "profile --plans"),
    ("fig10", lambda r: _without(r / "config/workload", "demo.json"), "config/workload/demo.json", "resolve"),
    ("table1", lambda r: _without(r / "train/cp", "summary.json"), "train/cp/summary.json", "train"),
]


@pytest.mark.parametrize(("name", "damage", "file", "remedy"), BROKEN)
def test_a_missing_or_broken_input_is_one_line_with_the_file_and_its_remedy(results, law, name, damage, file, remedy):
    damage(results)
    with pytest.raises(UserError) as error:
        make_figure(name, results, results / "figures")
    message = str(error.value)
    assert file in message and remedy in message and "\n" not in message
    assert not (results / "figures").exists()


def test_header_only_table_holds_no_rows(results, law):
    path = results / "train" / "gcn" / "epochs.csv"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match="holds no rows"):
        make_figure("fig8b", results, results / "figures")


def test_figures_without_runs_or_search_say_what_to_set(results):
    with pytest.raises(UserError, match=r"figures\.table1\.runs"):
        table01.collect(results, FigureConfig())
    with pytest.raises(UserError, match=r"figures\.fig10\.search"):
        fig10.collect(results, FigureConfig())
    with pytest.raises(UserError, match="fig99"):
        make_figure("fig99", results, results / "figures")


def test_runs_without_a_curve_and_grids_without_depths_are_refused(results, make, law):
    make.write_run(results, make.summary("lost", make.plan(1, 1, 1, (4,)), status="oom"))
    with pytest.raises(UserError, match="run lost: status is oom"):
        fig08b.collect(results, FigureConfig(runs=("lost",)))
    make.write_fit(results, rows=make.grid_rows(depths=(4,)))
    with pytest.raises(UserError, match="single depth 4"):
        fig09b.collect(results, SEARCH)


def test_a_cell_in_two_shards_is_refused(results, make, law):
    write_csv(results / "search" / "demo" / "grid-7.csv", make.grid_rows()[:1])
    with pytest.raises(UserError, match="stands twice"):
        fig09a.collect(results, SEARCH)


def test_no_depth_penalty_is_drawn_as_no_break(results, law):
    path = results / "search" / "demo" / "cost.json"
    flat = {"form": 0.0, "l_break": 0.0, "gamma": 1.0, "l_break_low": 0.0, "l_break_high": 0.0}
    CostModel.load(path).model_copy(update={"depth": flat}).save(path)
    frame = fig09b.collect(results, SEARCH)
    texts = [text.get_text() for text in fig09b.draw(frame).axes[0].texts]
    assert any("no break found" in text for text in texts)
