"""A piece of configuration checked by its model: what is wrong is one line for the person who wrote it."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from megagraph.config_parallel import UserError


def one_line(error: ValidationError) -> str:
    """A pydantic error as one line: the field, the value, the rule."""
    parts = []
    for item in error.errors():
        where = ".".join(str(step) for step in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key: remove it or correct its spelling"
        parts.append(f"{where}: {message}" if where else message)
    return "; ".join(parts)


def validated(kind: Any, body: object, where: str, remedy: str = "") -> Any:
    """`body` as a `kind`, a model or a union of models; `UserError` names `where` it is, the rule and the remedy."""
    try:
        return TypeAdapter(kind).validate_python(body)
    except ValidationError as error:
        raise UserError(": ".join(part for part in (where, one_line(error), remedy) if part)) from None
