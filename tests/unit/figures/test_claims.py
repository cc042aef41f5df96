"""The paper's values, what each evaluator finds in synthetic results, and the rule of statuses."""

import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from megagraph.artifacts import RunSummary
from megagraph.config import ModelConfig, RunConfig, TrainConfig, UserError
from megagraph.figures.claims import Claim, Finding, load_claims, status
from megagraph.figures.evaluators import EVALUATORS, evaluate
from megagraph.figures.evidence import Evidence
from megagraph.figures.report import claim_table

VALUES = Path(__file__).parents[3] / "config" / "paper_values.yaml"
CLAIMS = {claim.id: claim for claim in load_claims(VALUES).claims}


@pytest.fixture
def copy(drawn, tmp_path):
    """A copy of the drawn results that a test may change."""
    return Path(shutil.copytree(drawn.results, tmp_path / "copy"))


def judge(results, number):
    finding = evaluate(Evidence(results), CLAIMS[number])
    return status(CLAIMS[number], finding), finding


def change(results, name, **columns):
    path = results / "figures" / f"{name}.csv"
    pd.read_csv(path).assign(**columns).to_csv(path, index=False)


def test_all_27_claims_are_there_and_each_is_spoken_of_or_says_what_is_missing():
    assert sorted(CLAIMS) == list(range(1, 28))
    assert {number for number, claim in CLAIMS.items() if claim.source} == set(EVALUATORS)
    for number, names in ((18, {"mape_percent": 3.37, "r2": 0.994}), (20, {"single_gb": 70.56, "cp_gb": 13.5})):
        have = {value.name: value.value for value in CLAIMS[number].values}
        assert names.items() <= have.items()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda claim: claim.update(colour="red"), "unknown key"),
        (lambda claim: claim.update(source=None, needs=None), "neither source nor needs"),
        (lambda claim: claim.update(id="x"), "id"),
    ],
)
def test_paper_values_are_validated(tmp_path, edit, message):
    raw = yaml.safe_load(VALUES.read_text())
    edit(raw["claims"][0])
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match=message) as error:
        load_claims(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_paper_values_missing_broken_or_repeated(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_claims(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("claims: [")
    with pytest.raises(UserError, match="not YAML"):
        load_claims(broken)
    raw = yaml.safe_load(VALUES.read_text())
    raw["claims"].append(raw["claims"][0])
    broken.write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match="claim id 1 stands twice"):
        load_claims(broken)


def claim(**changes):
    body = {
        "id": 1,
        "where": "Table I",
        "claim": "x",
        "values": [{"name": "ratio", "value": 5.0}],
        "trend": {"ratio": {"min": 1.0}},
        "tolerance": 0.1,
        "configuration": "-",
        "hardware": "A100",
        "scale": {"device": "A100", "layers": 32},
        "source": "table1",
    }
    return Claim.model_validate({**body, **changes})


AT_SCALE = {"device": "NVIDIA A100-SXM4-80GB", "layers": 32}


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (Finding(values={"ratio": 5.2}, scale=AT_SCALE), "reproduced"),
        (Finding(values={"ratio": 3.0}, scale=AT_SCALE), "same trend"),
        (Finding(values={"ratio": 5.0}, scale={**AT_SCALE, "layers": 4}), "same trend"),
        (Finding(values={"ratio": 5.0}, scale={**AT_SCALE, "device": "cpu"}), "same trend"),
        (Finding(values={"ratio": 5.0}), "same trend"),
        (Finding(values={"ratio": 0.9}, scale=AT_SCALE), "contradicted"),
        (Finding(values={"ratio": math.nan}, scale=AT_SCALE), "contradicted"),
        (Finding(values={"ratio": 5.0}, scale=AT_SCALE, estimated=True), "estimated"),
        (Finding(missing="needs a GPU"), "not run (needs a GPU)"),
    ],
)
def test_status(finding, expected):
    assert status(claim(), finding) == expected


def test_what_the_paper_does_not_pin_down_is_never_reproduced():
    assert status(claim(reproducible=False), Finding(values={"ratio": 5.0}, scale=AT_SCALE)) == "same trend"


def test_partitions(drawn):
    verdict, finding = judge(drawn.results, 1)
    assert verdict == "reproduced" and finding.values == {"partitions": 1771}


def test_profiling(drawn):
    verdict, finding = judge(drawn.results, 5)
    assert verdict == "same trend" and finding.values == {"warmup": 2, "repeats": 3}


def test_end_to_end_configuration_is_the_papers_only_if_all_of_it_is(copy, make):
    verdict, finding = judge(copy, 6)
    assert verdict.startswith("not run") and "layers 4 instead of 16" in finding.ours
    config = RunConfig(id="cp", dataset="digits", model=ModelConfig(layers=16), train=TrainConfig())
    make.write_config(copy, "run", "cp", config)
    assert judge(copy, 6)[0] == "same trend"
    path = copy / "train" / "cp" / "summary.json"
    body = RunSummary.load(path)
    origin = body.provenance.model_copy(update={"device": "NVIDIA A100 80GB"})
    body.model_copy(update={"provenance": origin}).save(path)
    assert judge(copy, 6)[0] == "reproduced"


def test_rank_accuracy_compares_only_runs_that_differ_in_the_plan(copy, make):
    verdict, finding = judge(copy, 8)
    assert verdict == "same trend" and finding.values["difference_pp"] == pytest.approx(0.1)
    make.write_run(copy, make.summary("other", make.plan(1, 2, 1, (4,)), test_accuracy=0.5, epochs=7))
    assert judge(copy, 8)[1].values["difference_pp"] == pytest.approx(0.1)
    make.write_run(copy, make.summary("worse", make.plan(1, 2, 1, (4,)), test_accuracy=0.897))
    verdict, finding = judge(copy, 8)
    assert verdict == "contradicted" and finding.values["difference_pp"] == pytest.approx(0.3)


def test_convergence_shows_the_control_but_stays_open(drawn):
    verdict, finding = judge(drawn.results, 11)
    assert verdict == "not run (needs the ansgt and torchgt systems)"
    assert "mega (megagraph)" in finding.ours and "gcn (gcn)" in finding.ours


def test_grid(copy):
    assert judge(copy, 17)[0] == "same trend"
    path = copy / "figures" / "fig9a.csv"
    pd.read_csv(path).query("layers < 32").to_csv(path, index=False)
    assert judge(copy, 17)[0] == "not run (needs the paper's grid)"


def test_memory_model(copy):
    verdict, finding = judge(copy, 18)
    frame = pd.read_csv(copy / "figures" / "fig9a.csv")
    assert verdict == "same trend"
    assert finding.values["mape_percent"] == pytest.approx(frame["error_percent"].abs().mean())
    assert "held out 4.20 %" in finding.ours
    change(copy, "fig9a", mape_percent=12.0)
    assert judge(copy, 18)[0] == "contradicted"


def test_depth_law(copy):
    assert judge(copy, 19)[0] == "same trend"
    change(copy, "fig9b", gamma=1.0, form="none", l_break=0.0)
    verdict, finding = judge(copy, 19)
    assert verdict == "contradicted" and "no break" in finding.ours
    path = copy / "figures" / "fig9b.csv"
    pd.read_csv(path).query("layers <= 8").to_csv(path, index=False)
    assert judge(copy, 19)[0] == "not run (needs depths beyond 8 layers)"


def test_table1_claims_by_value(drawn):
    assert judge(drawn.results, 13)[1].values["speedup"] == pytest.approx(4.0 / 2.2)
    assert judge(drawn.results, 20)[1].values["reduction"] == pytest.approx(2.5)
    assert judge(drawn.results, 21)[1].values["slowdown"] == pytest.approx((2.5 / 2.2 - 1) * 100)
    even = judge(drawn.results, 22)[1].values
    assert (even["time_over_cp"], even["memory_over_cp"]) == (pytest.approx(1.2), pytest.approx(1.875))
    uneven = judge(drawn.results, 23)[1].values
    assert uneven["time_over_others"] == pytest.approx(0.88)
    assert uneven["memory_over_even"] == pytest.approx(0.7)
    assert {judge(drawn.results, number)[0] for number in (13, 20, 21, 22, 23)} == {"same trend"}


@pytest.mark.parametrize(
    ("number", "run", "column", "value"),
    [
        (13, "single", "seconds_per_epoch", 3.0),
        (20, "cp", "peak_gb", 0.039),
        (21, "cp", "seconds_per_epoch", 2.0),
        (21, "cp", "seconds_per_epoch", 5.0),
        (22, "even", "peak_gb", 0.01),
        (22, "even", "seconds_per_epoch", 2.4),
        (23, "uneven", "seconds_per_epoch", 2.6),
        (23, "uneven", "peak_gb", 0.031),
    ],
)
def test_table1_claims_can_be_contradicted(copy, number, run, column, value):
    path = copy / "figures" / "table1.csv"
    frame = pd.read_csv(path)
    frame.loc[frame["run"] == run, column] = value
    frame.to_csv(path, index=False)
    assert judge(copy, number)[0] == "contradicted"


def test_table1_claims_say_what_is_missing_and_what_is_estimated(copy):
    path = copy / "figures" / "table1.csv"
    frame = pd.read_csv(path)
    frame.assign(memory_source="predicted by the cost model").to_csv(path, index=False)
    assert judge(copy, 20)[0] == "estimated" and judge(copy, 21)[0] == "same trend"
    frame.assign(status=["oom", "ok", "ok", "ok"]).to_csv(path, index=False)
    assert judge(copy, 20)[0] == "not run (the row (1,1,1) ran out of memory)"
    frame[frame["strategy"] != "PP, even"].to_csv(path, index=False)
    assert judge(copy, 22)[0] == "not run (needs the row even pipeline (2,1,1) in table1)"
    path.unlink()
    assert judge(copy, 23)[0] == "not run (needs table1)"


def test_plan_claims(copy):
    verdict, finding = judge(copy, 24)
    assert verdict == "same trend" and finding.values == {"configurations": 30, "strategies": 6}
    verdict, finding = judge(copy, 25)
    assert verdict == "estimated"
    assert finding.values["dp_on_frontier"] == 0 and finding.values["cp_over_least_memory"] == 1
    verdict, finding = judge(copy, 26)
    assert verdict == "same trend" and finding.values == {"seconds": 0.012, "pick_over_optimum": 1}
    verdict, finding = judge(copy, 27)
    assert verdict == "same trend" and finding.values["pick_is_pp_dp"] == 1
    assert finding.values["measured_over_limit"] == pytest.approx(0.97)


def test_plan_claims_can_be_contradicted(copy):
    change(copy, "fig10", search_seconds=30.0, limit_bytes=2.5e7)
    assert judge(copy, 26)[0] == "contradicted"
    assert judge(copy, 27)[0] == "contradicted"


def test_two_ranks_cannot_speak_of_hybrids(copy):
    change(copy, "fig10", world_size=2)
    for number in (24, 27):
        verdict, finding = judge(copy, number)
        assert verdict == "not run (needs 4 ranks, ours has 2)" and finding.ours != "-"


def test_nothing_drawn_leaves_everything_but_arithmetic_open(results):
    table = claim_table(Evidence(results), load_claims(VALUES).claims)
    kinds = table.set_index("id")["status"].str.split(" (", regex=False).str[0]
    assert kinds[1] == "reproduced"
    assert (kinds.drop([1, 5, 8]) == "not run").all()


def test_a_figure_of_a_run_that_has_gone_is_an_error(copy):
    shutil.rmtree(copy / "train" / "cp")
    with pytest.raises(UserError, match=r"cp/summary\.json"):
        judge(copy, 20)
