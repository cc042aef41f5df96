"""Which checkpoint a run goes on from: settings, graph, code and layout decide, and whether it has finished."""

import json

import numpy as np
import pytest

from megagraph.config import CoarseningConfig, ParallelPlan, PlantedConfig, RunConfig, UserError
from megagraph.graph.coarsen import coarsen
from megagraph.graph.planted import planted
from megagraph.train.engine import Data
from megagraph.train.progress import Epoch, Progress
from megagraph.train.resume import decide, identify


@pytest.fixture(scope="module")
def data():
    graph = planted("small", PlantedConfig(source="planted", nodes=60, communities=3, features=4))
    return Data(graph, coarsen(graph, CoarseningConfig(ratio=0.1)))


def run_config(train=None, **other):
    spec = {"id": "a", "dataset": "small", "model": {"layers": 2, "heads": 2, "hidden": 8}, "train": train or {}}
    return RunConfig.model_validate(spec | other)


PLAN = ParallelPlan(layers=(2,))
OTHER_PLAN = ParallelPlan(pp=2, layers=(1, 1))


def leave(folder, identity, name="000002-000001"):
    """What `decide` reads of a checkpoint."""
    (folder / name).mkdir(parents=True)
    (folder / name / "progress.json").write_text(json.dumps({"files": {}, "identity": identity}))
    return folder / name


def test_without_a_checkpoint_every_way_starts_afresh(tmp_path, data):
    identity = identify(run_config(), PLAN, data)
    for resume in ("no", "strict", "auto"):
        assert decide("a", identity, tmp_path / "none", resume).checkpoints == ()


def test_the_same_run_goes_on_unless_told_not_to(tmp_path, data):
    identity = identify(run_config(), PLAN, data)
    paths = leave(tmp_path, identity, "000002"), leave(tmp_path, identity)
    assert decide("a", identity, tmp_path, "no").checkpoints == ()
    for resume in ("strict", "auto"):
        start = decide("a", identity, tmp_path, resume)
        assert (start.checkpoints, start.same_layout) == (paths, True)


def test_a_finished_run_is_trained_again_by_the_workflow_only(tmp_path, data):
    identity = identify(run_config(), PLAN, data)
    path = leave(tmp_path, identity)
    (path / "finished").touch()
    assert decide("a", identity, tmp_path, "auto").checkpoints == ()
    assert decide("a", identity, tmp_path, "strict").checkpoints == (path,)


TRAINING = [
    ({"peak_lr": 0.5}, {}, "train.peak_lr"),
    ({"seed": 1}, {}, "train.seed"),
    ({}, {"model": {"layers": 2, "heads": 2, "hidden": 16}}, "model.hidden"),
    ({}, {"sampling": {"num_sampled": 3}}, "sampling.num_sampled"),
]


@pytest.mark.parametrize(("train", "other", "name"), TRAINING, ids=[name for *_, name in TRAINING])
def test_another_training_is_refused_or_started_afresh(tmp_path, data, caplog, train, other, name):
    leave(tmp_path, identify(run_config(), PLAN, data))
    identity = identify(run_config(train, **other), PLAN, data)
    with pytest.raises(UserError, match=rf"000002-000001 .* {name}: .*another folder"):
        decide("a", identity, tmp_path, "strict")
    with caplog.at_level("INFO"):
        assert decide("a", identity, tmp_path, "auto").checkpoints == ()
    (line,) = caplog.messages
    assert "starts afresh" in line and name in line


CHANGEABLE = [
    ({"epochs": 7}, PLAN, "train.epochs"),
    ({"warmup_epochs": 1}, PLAN, "train.warmup_epochs"),
    ({"prefetch": False}, PLAN, "train.prefetch"),
    ({"accumulate": 2}, PLAN, "train.accumulate"),
    ({}, OTHER_PLAN, "plan.layers"),
]


@pytest.mark.parametrize(("train", "plan", "name"), CHANGEABLE, ids=[name for *_, name in CHANGEABLE])
def test_what_a_person_may_change_and_the_workflow_may_not(tmp_path, data, caplog, train, plan, name):
    path = leave(tmp_path, identify(run_config(), PLAN, data))
    identity = identify(run_config(train), plan, data)
    start = decide("a", identity, tmp_path, "strict")
    assert (start.checkpoints, start.same_layout) == ((path,), name in ("train.epochs", "train.warmup_epochs"))
    with caplog.at_level("INFO"):
        assert decide("a", identity, tmp_path, "auto").checkpoints == ()
    assert name in caplog.text


def test_how_often_to_save_is_nobodys_identity(data):
    often = run_config({"checkpoint_every": 1, "checkpoint_steps": 1, "keep_checkpoints": 5})
    assert identify(often, PLAN, data) == identify(run_config(), PLAN, data)


def test_another_graph_of_the_same_name_is_another_training(tmp_path, data):
    leave(tmp_path, identify(run_config(), PLAN, data))
    features = data.graph.features_VF.copy()
    features[-1, -1] += np.float32(1e-3)
    other = Data(type(data.graph)(**vars(data.graph) | {"features_VF": features}), data.coarsening)
    with pytest.raises(UserError, match="graph"):
        decide("a", identify(run_config(), PLAN, other), tmp_path, "strict")


def test_other_code_is_another_run_for_the_workflow(tmp_path, data, monkeypatch):
    path = leave(tmp_path, identify(run_config(), PLAN, data))
    monkeypatch.setattr("megagraph.train.resume._digest_of_code", lambda: "another")
    identity = identify(run_config(), PLAN, data)
    assert decide("a", identity, tmp_path, "strict").checkpoints == (path,)
    assert decide("a", identity, tmp_path, "auto").checkpoints == ()


def progress(count):
    return Progress([Epoch(number, 1.0, float(number), 0.1) for number in range(1, count + 1)], [0.5, 0.25], 3.0)


def test_progress_within_an_epoch_survives_a_checkpoint():
    before = progress(2)
    after = Progress.load(json.loads(json.dumps(before.dump())))
    assert after == before
    assert after.position == (2, 2)
    after.add_step(0.75, 1.0)
    assert after.close_epoch(0.1) == Epoch(3, 0.5, 4.0, 0.1)
    assert after.losses == [] and after.position == (2, 0)


@pytest.mark.parametrize(
    ("same_layout", "count", "timed"),
    [(True, 9, [3, 4, 7, 8, 9]), (False, 9, [7, 8, 9]), (True, 5, [3, 4]), (False, 5, [5])],
)
def test_epochs_that_warm_up_or_had_another_layout_are_not_timed(same_layout, count, timed):
    """A run that stopped in epoch 5, memory being counted in epochs 5 and 6 again."""
    resumed = progress(4)
    resumed.restart(same_layout)
    resumed.epochs += progress(count).epochs[4:]
    assert resumed.steady_seconds() == timed
    assert progress(4).steady_seconds() == [3, 4]
    assert progress(2).steady_seconds() == [1, 2]
