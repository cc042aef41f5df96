"""The JSON schema of ``config/*.yaml``, made from the models: for editors and readers; a test keeps it in step."""

from __future__ import annotations

from typing import Any

from megagraph.config import Experiment, RunConfig


def experiment_schema() -> dict[str, Any]:
    """JSON schema of an experiment file, for editors; `defaults` and each run may give any part of a run."""
    schema = Experiment.model_json_schema()
    run = RunConfig.model_json_schema(ref_template="#/$defs/{model}")
    definitions = {"RunOverrides": run, **run.pop("$defs")}
    run["properties"].pop("id")
    for name in ("RunOverrides", "ParallelPlan"):
        definitions[name].pop("required", None)  # completed by merging; the merged run is validated whole
    schema["$defs"] |= definitions
    overrides = {"$ref": "#/$defs/RunOverrides"}
    schema["properties"]["defaults"] = {"title": "Defaults", "default": {}, **overrides}
    (identifier,) = schema["properties"]["runs"]["patternProperties"]
    schema["properties"]["runs"] |= {"patternProperties": {identifier: overrides}, "additionalProperties": False}
    return schema
