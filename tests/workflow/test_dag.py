"""What Snakemake would run, for every config, without running it."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.workflow

DRAWN = dict.fromkeys(("fig8b", "fig9a", "fig9b", "fig10", "table1"), 1)
SEARCHED = {"profile": 1, "fit": 1, "search": 1}
COUNTS = {
    "demo": {"dataset": 1, "coarsen": 1, "grid": 1, "plans": 1, "train": 7, **DRAWN, **SEARCHED},
    "citeseer": {"dataset": 1, "coarsen": 1, "train": 2, "fig8b": 1, **SEARCHED},
    "small": {"dataset": 3, "coarsen": 3, "grid": 6, "heldout": 1, "plans": 1, "train": 9, **DRAWN}
    | dict.fromkeys(SEARCHED, 3),
    "paper": {"dataset": 2, "coarsen": 2, "grid": 6, "heldout": 2, "plans": 1, "train": 8, **DRAWN}
    | dict.fromkeys(SEARCHED, 2),
}


@pytest.mark.parametrize("name", COUNTS)
def test_jobs_of_each_config(workflow, name):
    jobs = workflow.jobs(config=ROOT / "config" / f"{name}.yaml")
    resolve = jobs.pop("resolve")
    count = COUNTS[name]
    # One configuration file for each data set, coarsening, searched workload, run, and figure.
    wanted = sum(count.get(rule, 0) for rule in ("dataset", "coarsen", "profile", "train", *DRAWN))
    coarsenings_twice = {"small": 1, "paper": 0}.get(name, 0)
    assert resolve == wanted - coarsenings_twice
    assert jobs == {**count, "hardware": 1, "report": 1, "everything": 1}


def test_bare_snakemake_is_the_paper(workflow):
    assert workflow.jobs() == workflow.jobs(config=ROOT / "config" / "paper.yaml")


def test_the_catalogues_snakefile_is_the_same_workflow(workflow):
    inner = workflow.jobs("-s", ROOT / "workflow" / "Snakefile")
    assert inner.pop("all") == 1
    assert {**inner, "everything": 1} == workflow.jobs()


def test_one_figure_needs_only_its_ancestors(workflow):
    """Fig. 8(b) shows two runs: one takes its plan from the search, one has no search."""
    jobs = workflow.jobs("--", "fig8b", config=ROOT / "config" / "demo.yaml")
    assert jobs == {
        "hardware": 1,
        "resolve": 6,  # data set, coarsening, workload, two runs, the figure
        "dataset": 1,
        "coarsen": 1,
        "profile": 1,
        "grid": 1,
        "fit": 1,
        "search": 1,
        "train": 2,
        "fig8b": 1,
    }


def test_the_table_needs_no_search(workflow):
    jobs = workflow.jobs("--", "table1", config=ROOT / "config" / "demo.yaml")
    assert jobs.keys() == {"hardware", "resolve", "dataset", "coarsen", "train", "table1"}
    assert jobs["train"] == 5


def test_ranks_reach_the_command(workflow):
    done = workflow("-n", "-p", "--cores", "2", "--", "table1", config=ROOT / "config" / "demo.yaml")
    commands = re.findall(r"launch --nodes (\d) --tasks (\d) -- train results/config/run/(\S+)\.json", done.stdout)
    assert {run: (nodes, tasks) for nodes, tasks, run in commands} == {
        "digits-single": ("1", "1"),
        **dict.fromkeys(["digits-cp2", "digits-pp2-even", "digits-pp2-uneven", "digits-dp2"], ("1", "2")),
    }


def test_only_a_searched_run_is_given_the_search(workflow):
    done = workflow("-n", "-p", "--cores", "2", "--", "fig8b", config=ROOT / "config" / "demo.yaml")
    (searched,) = re.findall(r"train results/config/run/digits-megagraph\.json .*", done.stdout)
    (control,) = re.findall(r"train results/config/run/digits-gcn\.json .*", done.stdout)
    assert "--plan results/search/digits-megagraph/search.json" in searched
    assert "--plan" not in control


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.update(colour=1), ["colour", "unknown key"]),
        (
            lambda raw: raw["runs"]["digits-pp2-even"]["parallel"]["plan"].update(layers=[2, 3]),
            ["digits-pp2-even", "layers=[2, 3] sum to 5", "model.layers=4"],
        ),
    ],
)
def test_a_mistake_in_the_config_stops_the_parse(workflow, demo, tmp_path, change, words):
    change(demo)
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(demo))
    done = workflow("-n", config=config)
    (line,) = [line for line in done.stdout.splitlines() if words[0] in line]
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert all(word in line for word in words), line


def test_another_figure_than_the_configs_is_refused(workflow):
    done = workflow("-n", "fig10", config=ROOT / "config" / "citeseer.yaml")
    assert done.returncode == 1
    assert "MissingRuleException" in done.stdout
    assert "fig10" in done.stdout
