"""Keys of precision and accumulation: defaults keep old files valid, contradictions are refused in one line."""

import pytest

from megagraph.config import RunConfig, TrainConfig, UserError, load_experiment


def run(**spec):
    return RunConfig.model_validate({"id": "a", "dataset": "d", **spec})


def test_defaults_are_one_pass_in_one_precision():
    settings = TrainConfig()
    assert (settings.autocast, settings.accumulate) == ("none", 1)
    workload = run(train={"batch": 30}, sampling={"samples": 2}).workload
    assert (workload.autocast, workload.accumulate, workload.batch) == ("none", 1, 60)


def test_the_workload_is_a_pass_in_its_precision():
    workload = run(train={"batch": 30, "accumulate": 4, "autocast": "bfloat16"}, sampling={"samples": 2}).workload
    assert (workload.autocast, workload.accumulate, workload.batch) == ("bfloat16", 4, 16)
    union = {"builder": "union", "seeds_per_sequence": 7, "num_sampled": 1}
    assert run(train={"batch": 30, "accumulate": 2}, sampling=union).workload.batch == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"train": {"autocast": "bfloat16", "dtype": "float64"}}, r"autocast=bfloat16 .* dtype=float64: use"),
        ({"train": {"autocast": "float16"}}, "autocast"),
        ({"train": {"accumulate": 0}}, "accumulate"),
        ({"train": {"batch": 4, "accumulate": 5}}, r"accumulate=5 exceeds the 4 sequences .*batch=4.*: lower it"),
        ({"system": "gcn", "model": {"arch": "gcn"}, "train": {"autocast": "bfloat16"}}, "gcn .* set it to none"),
        ({"system": "gcn", "model": {"arch": "gcn"}, "train": {"accumulate": 2}}, "gcn .* set it to 1"),
    ],
)
def test_contradictions_are_one_line(spec, message):
    experiment = {"title": "t", "datasets": {"d": {"source": "digits"}}, "runs": {"a": {"dataset": "d", **spec}}}
    with pytest.raises(UserError, match=message) as caught:
        load_experiment(experiment)
    assert "\n" not in str(caught.value)
