"""The configuration: merging, validation across fields, what a workload leaves out."""

from pathlib import Path

import pytest
import yaml

from megagraph.config import (
    ParallelPlan,
    RunConfig,
    SamplingConfig,
    UserError,
    deep_merge,
    load_experiment,
)

CONFIG = Path(__file__).parents[2] / "config"


def raw():
    return {
        "title": "t",
        "datasets": {"d": {"source": "digits"}},
        "defaults": {"dataset": "d", "model": {"layers": 4, "hidden": 32}, "train": {"epochs": 7}},
        "runs": {"a": {}, "b": {"model": {"layers": 6}, "train": {"peak_lr": 0.1}}},
        "figures": {"fig8b": {"runs": ["a"]}, "fig10": {"search": "b"}},
    }


def spoilt(*path, value):
    config = raw()
    here = config
    for key in path[:-1]:
        here = here.setdefault(key, {})
    here[path[-1]] = value
    return config


def test_a_run_is_the_defaults_and_its_own_keys():
    b = load_experiment(raw()).run("b")
    assert (b.id, b.dataset, b.model.layers, b.model.hidden) == ("b", "d", 6, 32)
    assert (b.train.epochs, b.train.peak_lr) == (7, 0.1)


def test_merge_replaces_what_is_not_a_mapping_and_changes_no_argument():
    base = {"plan": "search", "x": {"y": 1}, "z": [1]}
    override = {"plan": {"layers": [4]}, "x": {"w": 2}, "z": [2]}
    assert deep_merge(base, override) == {"plan": {"layers": [4]}, "x": {"y": 1, "w": 2}, "z": [2]}
    assert base == {"plan": "search", "x": {"y": 1}, "z": [1]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (spoilt("colour", value=1), ["colour", "unknown key"]),
        (spoilt("runs", "a", value={"model": {"colour": 1}}), ["run a", "model.colour", "unknown key"]),
        (spoilt("runs", "a", value={"dataset": "x"}), ["run a", "dataset=x", "['d']"]),
        (spoilt("runs", "a", value={"coarsening": "x"}), ["run a", "coarsening=x"]),
        (spoilt("figures", "fig8b", value={"runs": ["x"]}), ["figure fig8b", "run x"]),
        (spoilt("figures", "fig10", value={"search": "x"}), ["figure fig10", "run x"]),
        (spoilt("figures", "fig99", value={}), ["fig99"]),
        (spoilt("runs", "A_1", value={}), ["A_1"]),
        (spoilt("datasets", "d", value={"source": "x"}), ["datasets.d", "'digits'"]),
        (spoilt("defaults", "model", "heads", value=5), ["hidden=32", "heads=5"]),
        (spoilt("defaults", "sampling", value={"heuristics": {}}), ["heuristics={}"]),
        (spoilt("defaults", "system", value="gcn"), ["system=gcn", "model.arch=hierarchical"]),
        (spoilt("defaults", "parallel", value={"world_size": 3, "nodes": 2}), ["world_size=3", "nodes=2"]),
        (
            spoilt("defaults", "parallel", value={"world_size": 2, "plan": {"layers": [4]}}),
            ["needs 1 ranks", "world_size=2"],
        ),
        (
            spoilt(
                "defaults",
                "parallel",
                value={"world_size": 2, "attention": "dense", "plan": {"cp": 2, "layers": [4]}},
            ),
            ["attention=dense", "cp=2"],
        ),
    ],
)
def test_mistakes_are_one_line(config, words):
    with pytest.raises(UserError) as error:
        load_experiment(config)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_gcn_trains_on_one_rank():
    with pytest.raises(ValueError, match="gcn trains on one rank but world_size=2"):
        RunConfig.model_validate(
            {"id": "a", "dataset": "d", "system": "gcn", "model": {"arch": "gcn"}, "parallel": {"world_size": 2}}
        )


def test_unknown_run_is_named():
    with pytest.raises(UserError, match="'x' is not in runs"):
        load_experiment(raw()).run("x")


def test_workload_has_no_training_settings():
    """A learning rate must not measure the machine again; a batch size must."""
    a = load_experiment(raw()).run("a")
    for key, value in (("peak_lr", 0.5), ("epochs", 3), ("seed", 9)):
        assert a.model_copy(update={"train": a.train.model_copy(update={key: value})}).workload == a.workload
    batch = a.model_copy(update={"train": a.train.model_copy(update={"batch": 3})})
    assert batch.workload != a.workload


def test_workload_counts_sequences():
    a = load_experiment(raw()).run("a")
    b = a.model_copy(update={"sampling": SamplingConfig(samples=3)})
    assert b.workload.batch == 3 * a.train.batch


def test_plan_checks_its_model():
    plan = ParallelPlan(pp=2, dp=2, layers=(1, 3), microbatches=4)
    plan.check(4)
    assert (plan.world_size, plan.label) == (4, "pp2[1,3] cp1 dp2 k4")
    with pytest.raises(UserError, match=r"layers=\[1, 3\] sum to 4 but model.layers=5"):
        plan.check(5)


@pytest.mark.parametrize("name", ["demo", "citeseer", "small", "paper"])
def test_configs_of_the_repository_are_valid(name):
    experiment = load_experiment(yaml.safe_load((CONFIG / f"{name}.yaml").read_text()))
    on_gpus = {experiment.run(run_id).device for run_id in experiment.runs} == {"cuda"}
    assert on_gpus == (experiment.gpus > 0)


def test_paper_has_the_papers_shapes():
    """Sections IV-A and IV-C."""
    paper = load_experiment(yaml.safe_load((CONFIG / "paper.yaml").read_text()))
    run = paper.run("citeseer-megagraph")
    model, train = run.model, run.train
    assert (model.layers, model.heads, model.hidden, model.ffn) == (16, 8, 64, 64)
    assert (model.bias_channels, model.global_tokens) == (4, 1)
    assert (train.epochs, train.peak_lr, train.weight_decay, train.batch) == (100, 2e-4, 0.01, 1024)
    for run_id in paper.figures["table1"].runs:
        run = paper.run(run_id)
        assert (run.model.layers, run.model.hidden, run.model.heads, run.train.batch) == (32, 128, 32, 256)
    grid = paper.run(paper.figures["fig9a"].search).profile.grid
    assert len(grid.batch) * len(grid.layers) * len(grid.heads) * len(grid.hidden) == 216
    assert 6 <= grid.shards <= 9


@pytest.mark.parametrize("name", ["paper", "small"])
def test_held_out_cells_are_no_cells_of_the_grid(name):
    experiment = load_experiment(yaml.safe_load((CONFIG / f"{name}.yaml").read_text()))
    profile = experiment.run(experiment.figures["fig9a"].search).profile
    assert not set(profile.heldout.layers) & set(profile.grid.layers)
    assert profile.heldout.tokens == profile.grid.tokens
    for other in profile.heldout_runs:
        assert experiment.run(other).dataset != experiment.run(experiment.figures["fig9a"].search).dataset


def test_held_out_runs_are_other_runs():
    demo = yaml.safe_load((CONFIG / "demo.yaml").read_text())
    searched = demo["figures"]["fig9a"]["search"]
    for other in ("nobody", searched):
        demo["runs"][searched].setdefault("profile", {})["heldout_runs"] = [other]
        with pytest.raises(UserError, match=f"heldout_runs={other}: name other runs"):
            load_experiment(demo)
