"""A setting's limits beside its default, and whether a value keeps to them."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import field
from typing import Any

from lapclip.errors import ConfigError, nearest


def knob(
    default: Any = dataclasses.MISSING, *, least: float | None = None, most: float | None = None, choices=()
) -> Any:
    """A field with its limits beside it."""
    limits = {"least": least, "most": most, "choices": tuple(choices)}
    if default is dataclasses.MISSING:
        return field(metadata=limits)
    return field(default=default, metadata=limits)


def checked(origin: str, section: str, kind: type, name: str, value: Any) -> Any:
    """The value of a field of a section, which is of that kind, or ConfigError where it may not be that."""
    known = {f.name: f for f in dataclasses.fields(kind)}
    if name not in known:
        raise ConfigError(f"{origin}: unknown field {section}.{name}. {nearest(name, known)}")
    limits = known[name].metadata
    place = f"{origin}: {section}.{name}"
    annotation = typing.get_type_hints(kind)[name]
    accepted = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if float in accepted and type(value) is int:
        value = float(value)
    if accepted == (str,) and type(value) in (int, float):
        value = str(value)  # a folder, a column or a list of one may look like a number
    if type(value) not in accepted:
        expected = " or ".join(
            {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}[t.__name__]
            for t in accepted
        )
        raise ConfigError(f"{place} must be {expected}, not {value!r}.")
    if isinstance(value, str) and limits["choices"] and value not in limits["choices"]:
        raise ConfigError(f"{place} cannot be {value!r}; it is one of {', '.join(limits['choices'])}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{place} must be a finite number, not {value}.")
    if not isinstance(value, str):
        if limits["least"] is not None and value < limits["least"]:
            raise ConfigError(f"{place} must be at least {limits['least']}, not {value}.")
        if limits["most"] is not None and value > limits["most"]:
            raise ConfigError(f"{place} must be at most {limits['most']}, not {value}.")
    return value
