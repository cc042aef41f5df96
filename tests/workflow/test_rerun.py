"""A changed setting runs again exactly what depends on it."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.workflow

DEMO = ROOT / "config" / "demo.yaml"
ABLATION = ("digits-single", "digits-cp2", "digits-pp2-even", "digits-pp2-uneven", "digits-dp2")
RUNS = ("digits-megagraph", "digits-gcn", *ABLATION)
SEARCH = {
    "profile/digits-megagraph",
    "grid/digits-megagraph-0",
    "fit/digits-megagraph",
    "search/digits-megagraph",
    "plans/digits-megagraph",
}
FROM_SEARCH = {"figure/fig9a", "figure/fig9b", "figure/fig10"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, workflow_in):
    """A results folder as a finished demo leaves it: real configuration files, empty files for all that costs time."""
    workflow = workflow_in(tmp_path_factory.mktemp("finished"))
    pieces = [f"run/{run}" for run in RUNS] + [f"figure/{name}" for name in ("fig8b", "fig9a", "fig9b", "fig10")]
    pieces += ["figure/table1", "dataset/digits", "coarsening/default", "workload/digits-megagraph"]
    done = workflow("--cores", "2", *(f"results/config/{piece}.json" for piece in pieces), config=DEMO)
    assert done.returncode == 0, done.stderr
    train = [f"train/{run}/{name}" for run in RUNS for name in ("summary.json", "epochs.csv")]
    search = [f"search/digits-megagraph/{name}" for name in ("profile.json", "grid-0.csv", "cost.json", "search.json")]
    drawn = [f"figures/{fig}.{kind}" for fig in ("fig8b", "fig9a", "fig9b", "fig10") for kind in ("pdf", "png", "csv")]
    table = [f"figures/table1.{kind}" for kind in ("pdf", "png", "csv", "md", "tex")]
    data = [f"data/digits/{name}" for name in ("graph.safetensors", "manifest.json", "default.safetensors")]
    last = ["search/digits-megagraph/plans.csv", *train, *drawn, *table, "report.md", "report.csv"]
    for name in [*data, *search, *last]:
        path = workflow.folder / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return workflow


def planned(workflow, tmp_path, demo):
    config = tmp_path / "changed.yaml"
    config.write_text(yaml.safe_dump(demo, sort_keys=False))
    return workflow.planned(config)


def test_nothing_changed(finished, tmp_path, demo):
    assert planned(finished, tmp_path, demo) == set()


def test_a_learning_rate_of_one_run(finished, tmp_path, demo):
    demo["runs"]["digits-gcn"]["train"]["peak_lr"] = 0.02
    assert planned(finished, tmp_path, demo) == {
        "resolve/run-digits-gcn",
        "train/digits-gcn",
        "figure/fig8b",
        "report",
    }


def test_epochs_of_a_searched_run_measure_nothing_again(finished, tmp_path, demo):
    demo["defaults"]["train"]["epochs"] = 13  # the other runs have their own number
    assert planned(finished, tmp_path, demo) == {
        "resolve/run-digits-megagraph",
        "train/digits-megagraph",
        "figure/fig8b",
        "report",
    }


def test_the_profiles_settings_measure_again(finished, tmp_path, demo):
    demo["runs"]["digits-megagraph"]["profile"] = {"repeats": 4}
    jobs = planned(finished, tmp_path, demo)
    assert jobs == {
        "resolve/workload-digits-megagraph",
        "resolve/run-digits-megagraph",
        "train/digits-megagraph",
        "figure/fig8b",
        "report",
        *SEARCH,
        *FROM_SEARCH,
    }


def test_the_runs_of_a_figure(finished, tmp_path, demo):
    demo["figures"]["table1"]["runs"] = ["digits-single", "digits-cp2"]
    assert planned(finished, tmp_path, demo) == {"resolve/figure-table1", "figure/table1", "report"}


def test_the_graph_itself(finished, tmp_path, demo):
    demo["datasets"]["digits"]["neighbors"] = 5
    jobs = planned(finished, tmp_path, demo)
    assert {"resolve/dataset-digits", "dataset/digits", "coarsen/digits-default", *SEARCH} <= jobs
    assert {f"train/{run}" for run in RUNS} <= jobs
    assert {job for job in jobs if job.startswith("resolve/")} == {"resolve/dataset-digits"}


def test_other_hardware_needs_only_another_look(finished, tmp_path, demo):
    demo["gpus"] = 1
    assert planned(finished, tmp_path, demo) == {"hardware"}
