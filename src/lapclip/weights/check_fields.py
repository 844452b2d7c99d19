"""Check the fields of a model's configuration before anything is computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from lapclip.config import ModelConfig, checked
from lapclip.errors import ConfigError, WeightsError

LARGEST = 1_000_000
"""Largest size in a configuration that counts as sound; published models stay below a third of it."""


class Rule(NamedTuple):
    """Which values a field may have."""

    text: str
    """The same for a person, after "must be"."""
    fits: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that a float can hold."""
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


def whole(least: int = 1) -> Rule:
    return Rule(
        f"a whole number from {least} to {LARGEST:,}",
        lambda value: type(value) is int and least <= value <= LARGEST,
    )


def one_of(*values: Any) -> Rule:
    def fits(value: Any) -> bool:
        return any(type(value) is type(allowed) and value == allowed for allowed in values)

    return Rule(f"one of {', '.join(map(repr, values))}", fits)


SIZE = whole()
POSITIVE = Rule("a number above 0", lambda value: is_number(value) and value > 0)
STRING = Rule("text", lambda value: isinstance(value, str))
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
SECTION = Rule("an object", lambda value: isinstance(value, dict))
SIDES = Rule(
    f"a whole number from 1 to {LARGEST:,}, or two of them",
    lambda value: (
        SIZE.fits(value)
        or (isinstance(value, list) and len(value) == 2 and all(map(SIZE.fits, value)))
    ),
)
COLORS = Rule(
    "three numbers",
    lambda value: isinstance(value, list) and len(value) == 3 and all(map(is_number, value)),
)
EDGES = ("shortest_edge", "height", "width")
SIDE_OR_EDGES = Rule(
    f"a whole number from 1 to {LARGEST:,}, or an object with shortest_edge or height and width",
    lambda value: (
        SIZE.fits(value)
        or (
            isinstance(value, dict)
            and ("shortest_edge" in value or {"height", "width"} <= set(value))
            and all(SIZE.fits(value[edge]) for edge in EDGES if edge in value)
        )
    ),
)


def or_null(rule: Rule) -> Rule:
    return Rule(f"{rule.text}, or null", lambda value: value is None or rule.fits(value))


def check_fields(config: Mapping[str, Any], rules: Mapping[str, Rule], where: str) -> None:
    """Raise WeightsError for the first field whose value is not allowed. Fields may be missing.

    A field inside a section is named with dots: `vision_config.hidden_size`.
    """
    for name, rule in rules.items():
        values: Any = config
        *sections, field = name.split(".")
        for section in sections:
            values = values.get(section) or {}
        if field in values and not rule.fits(values[field]):
            raise WeightsError(
                f"{where}: {name} is {values[field]!r:.80}; it must be {rule.text}.",
                hint="download or copy the model again",
            )


def checked_shape(values: Any, where: str) -> ModelConfig:
    """Return the shape that a saved model of ours describes, each field checked as a setting is."""
    check_fields({"model": values}, {"model": SECTION}, where)
    required = [field.name for field in fields(ModelConfig) if field.default is MISSING]
    for name in required:
        if name not in values:
            raise WeightsError(f"{where}: model.{name} is missing.")
    for name, value in values.items():
        if type(value) is int and value > LARGEST:
            raise WeightsError(
                f"{where}: model.{name} is {value!r:.80}; it must be at most {LARGEST:,}."
            )
    try:
        sound = {name: checked(where, "model", name, value) for name, value in values.items()}
        return ModelConfig(**sound)
    except ConfigError as error:
        message = error.message.removeprefix(f"{where}: ")
        raise WeightsError(f"{where}: {message}") from None
