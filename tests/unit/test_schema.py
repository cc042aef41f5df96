"""config/schema.json is what the models say, and every config in the repository fits it."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from megagraph.schema import experiment_schema

CONFIG = Path(__file__).parents[2] / "config"
EXPERIMENTS = ["demo", "citeseer", "small", "paper"]


def test_the_file_is_in_step():
    assert json.loads((CONFIG / "schema.json").read_text()) == experiment_schema(), (
        "run: python -m megagraph schema --out config/schema.json"
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_configs_fit(name):
    jsonschema.validate(yaml.safe_load((CONFIG / f"{name}.yaml").read_text()), experiment_schema())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw["runs"]["digits-megagraph"].update(colour=1),
        lambda raw: raw["defaults"]["train"].update(epochs=0),
        lambda raw: raw["runs"]["digits-cp2"]["parallel"]["plan"].update(pp=0),
        lambda raw: raw["datasets"]["digits"].update(source="figits"),
        lambda raw: raw["figures"].update(fig99={}),
    ],
)
def test_editors_see_mistakes(spoil):
    raw = yaml.safe_load((CONFIG / "demo.yaml").read_text())
    spoil(raw)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(raw, experiment_schema())
