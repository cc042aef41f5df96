"""Keys of precision: defaults keep old files valid, contradictions are refused in one line."""

import pytest

from megagraph.config import RunConfig, TrainConfig, UserError, load_experiment


def run(**spec):
    return RunConfig.model_validate({"id": "a", "dataset": "d", **spec})


def test_the_default_is_one_precision():
    assert TrainConfig().autocast == "none"
    assert run().workload.autocast == "none"


def test_the_workload_has_the_precision():
    assert run(train={"autocast": "bfloat16"}).workload.autocast == "bfloat16"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"train": {"autocast": "bfloat16", "dtype": "float64"}}, r"autocast=bfloat16 .* dtype=float64: use"),
        ({"train": {"autocast": "float16"}}, "autocast"),
        ({"system": "gcn", "model": {"arch": "gcn"}, "train": {"autocast": "bfloat16"}}, "gcn .* set it to none"),
    ],
)
def test_contradictions_are_one_line(spec, message):
    experiment = {"title": "t", "datasets": {"d": {"source": "digits"}}, "runs": {"a": {"dataset": "d", **spec}}}
    with pytest.raises(UserError, match=message) as caught:
        load_experiment(experiment)
    assert "\n" not in str(caught.value)
