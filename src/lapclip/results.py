"""Files of results that people share: what was measured, on which machine, and nothing else. No torch.

There are three kinds: a training run (`lapclip report --share`), a comparison of devices (`lapclip compare --share`)
and training steps beside another trainer's (`benchmarks/steps.py --share`). Each is a small JSON file with a checksum,
which tells a file that was edited or damaged; it is no signature. Files come from strangers, so `read_result` checks
every field before anything is shown of it.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lapclip.errors import ConfigError
from lapclip.paths import digest_of_json, parse_json, read_bytes, write_atomic
from lapclip.text import number, one_line

FORMAT = 1
RUN, COMPARISON, STEPS = "run", "comparison", "steps"
SCENES, FLICKR8K, OWN = "scenes", "flickr8k", "own"
"""Which data a run learnt from: drawn scenes, Flickr8k with its authors' splits, or anything else."""
NOT_SHARED = "not shared"
"""Stands for a value that could tell something about a person, such as a path."""
LARGEST_RESULT = 2_000_000
"""Bytes of a file. A run has some thousand, a whole comparison some ten thousand."""
LONGEST_TEXT, LONGEST_SENTENCE, MOST_ROWS, LARGEST_NUMBER = 300, 2_000, 5_000, 1e18
SMALLEST_NUMBER = 1e-9
"""What a number that others are divided by has to be above, so that all that is shown is finite."""

Check = Callable[[Any], bool]
Shape = Any
"""How a value has to be: a check; `{name: shape}` for an object with these fields, `{str: shape}` for one with any;
`[shape]` for a list; `(shape, None)` for a value that may be null or, as a field, missing."""


def text(value: Any) -> bool:
    """a short text that can be printed"""
    return isinstance(value, str) and 0 < len(value) <= LONGEST_TEXT and value.isprintable()


def sentence(value: Any) -> bool:
    """a text that can be printed"""
    return isinstance(value, str) and 0 < len(value) <= LONGEST_SENTENCE and value.isprintable()


def amount(value: Any) -> bool:
    """a number from 0 up"""
    found = number(value)
    return found is not None and 0 <= found < LARGEST_NUMBER


def whole(value: Any) -> bool:
    """a whole number from 0 up"""
    return amount(value) and isinstance(value, int)


def positive(value: Any) -> bool:
    """a number above 0"""
    return amount(value) and value > SMALLEST_NUMBER


def fraction(value: Any) -> bool:
    """a number from 0 to 1"""
    return amount(value) and value <= 1


def flag(value: Any) -> bool:
    """true or false"""
    return isinstance(value, bool)


def plain(value: Any) -> bool:
    """a number, a short text, true or false"""
    return flag(value) or number(value) is not None or text(value)


def anything(value: Any) -> bool:
    """anything: it is never shown"""
    return True


def one_of(*choices: Any) -> Check:
    def known(value: Any) -> bool:
        return isinstance(value, str | int) and value in choices

    known.__doc__ = " or ".join(map(str, choices))
    return known


MACHINE: Shape = {
    "chip": text,
    "cores": whole,
    "memory_bytes": amount,
    "system": text,
    "architecture": text,
    "python": text,
}
ABOUT: Shape = {
    "format": one_of(FORMAT),
    "machine": MACHINE,
    "devices": {str: text},
    "lapclip": text,
    "torch": text,
}
RECALLS: Shape = {f"{way}_r{rank}": fraction for way in ("t2i", "i2t") for rank in (1, 5, 10)}
RESULTS: dict[str, Shape] = {
    RUN: {
        **ABOUT,
        "kind": one_of(RUN),
        "commit": (text, None),
        "data": one_of(SCENES, FLICKR8K, OWN),
        "pairs": {str: whole},
        "recipe": text,
        "changed": {str: plain},
        "start": text,
        "model": text,
        "parameters": whole,
        "batch_size": whole,
        "towers": {"image": text, "text": text},
        "choices": {str: plain},
        "ranks": whole,
        "state": text,
        "step": whole,
        "steps": whole,
        "set_up_seconds": amount,
        "training_seconds": amount,
        "pairs_per_second": (amount, None),
        "peak_memory_bytes": (amount, None),
        "joules": (amount, None),
        "evaluations": [{"seconds": amount, "step": whole, "t2i_r1": fraction, "t2i_r10": fraction}],
        "evaluation": {"split": text, "candidates": whole, "chance": (fraction, None), **RECALLS},
    },
    COMPARISON: {
        **ABOUT,
        "kind": one_of(COMPARISON),
        "warnings": [sentence],
        "cells": [
            {
                **dict.fromkeys(("device", "dtype", "model"), text),
                **dict.fromkeys(("threads", "parameters", "batch", "layers"), whole),
                "work": amount,
                "used_threads": (whole, None),
                **dict.fromkeys(("ms", "pairs_per_second", "joules", "fitted_ms"), (amount, None)),
                "peak_memory_bytes": (amount, None),
                "skipped": (text, None),
                "too_large": (flag, None),
            }
        ],
        "fits": [
            {
                **dict.fromkeys(("device", "dtype"), text),
                "threads": whole,
                **dict.fromkeys(("overhead_ms", "ms_per_layer", "ns_per_parameter"), amount),
                "flops_per_second": amount,
                "error": amount,
            }
        ],
        "crossover": {"text": sentence, "points": (anything, None)},
        "predictions": anything,
        "recommendations": [
            {
                **dict.fromkeys(("device", "dtype", "text"), text),
                **dict.fromkeys(("threads", "parameters", "batch"), whole),
            }
        ],
        "microscope": (anything, None),
    },
    STEPS: {
        **ABOUT,
        "kind": one_of(STEPS),
        "commit": (text, None),
        "peer": text,
        "rounds": whole,
        "rows": [
            {
                **dict.fromkeys(("model", "device", "dtype", "peer_settings"), text),
                **dict.fromkeys(("batch", "caption_tokens"), whole),
                **dict.fromkeys(("ours_ms", "peer_ms", "limit_ms"), positive),
            }
        ],
    },
}
HOW = {
    RUN: "lapclip report RUN --share FILE",
    COMPARISON: "lapclip compare --share FILE",
    STEPS: "python benchmarks/steps.py --share FILE",
}
"""What writes each kind."""


def shared_machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What of a machine's facts is shared. Of the releases only their numbers: a kernel that somebody built may bear
    a name."""
    numbers = {
        name: re.match(r"(?:[A-Za-z]+ )?\d[\d.]*\d|[A-Za-z]+", str(facts.get(name))) for name in ("system", "python")
    }
    return {
        "chip": one_line(facts.get("chip") or "unknown")[:LONGEST_TEXT],
        "cores": int(number(facts.get("cores")) or 0),
        "memory_bytes": int(number(facts.get("memory_bytes")) or 0),
        "architecture": one_line(facts.get("architecture") or "unknown")[:LONGEST_TEXT],
        **{name: found[0] if found else "unknown" for name, found in numbers.items()},
    }


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A result with its checksum."""
    own = {name: value for name, value in content.items() if name != "checksum"}
    return {**own, "checksum": digest_of_json(own)}


def to_text(content: Mapping[str, Any]) -> str:
    """A result as its file holds it: a line for each field, so that a person can read all of it."""
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_result(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result that was sealed."""
    try:
        write_atomic(path, to_text(content))
    except OSError as error:
        raise _cannot_write(path, error) from None


def check_writable(path: Path) -> None:
    """Raise ConfigError where a result could not be written, before minutes are spent on it. What is there stays as it
    is, and where nothing is nothing stays: the command may yet be interrupted. Only another result is replaced."""
    there = path.exists()
    if path.is_file() and path.stat().st_size and not _is_result(path):
        raise ConfigError(f"{path} is there already, and is no result of lapclip.", hint="--share another.json")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.touch()
        if not there:
            path.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from None


def _is_result(path: Path) -> bool:
    try:
        read_result(path)
    except ConfigError:
        return False
    return True


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {error.strerror or error}.", hint="--share another.json")


def read_result(path: Path, wanted: str = "") -> dict[str, Any]:
    """A result that somebody shared, of the wanted kind or of any, whose every field is as it should be. ConfigError
    where it is not."""
    kind = wanted
    try:
        found = parse_json(read_bytes(path, LARGEST_RESULT, own=True).decode("utf-8"))
        if wanted not in (kind_of(found), ""):
            raise ValueError(f"it is no {wanted} that lapclip shared")
        kind = kind_of(found)
        if not kind:
            raise ValueError("it is no result that lapclip shared")
        if "checksum" not in found:
            raise ValueError("it has no checksum")
        if sealed(found)["checksum"] != found["checksum"]:
            raise ValueError("its checksum does not fit, so it was edited or damaged")
        if found.get("format") != FORMAT:
            raise ValueError(f"it has another format; this lapclip reads {FORMAT}")
        check_shape({name: value for name, value in found.items() if name != "checksum"}, RESULTS[kind])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be used: it is no text.", hint=HOW[RUN]) from None
    except (ValueError, RecursionError) as error:
        reason = str(error) if not isinstance(error, RecursionError) else "it is nested too deeply"
        hint = f"{HOW[kind or RUN]}, on the machine that it came from"
        raise ConfigError(f"{path} cannot be used: {one_line(reason)[:LONGEST_TEXT]}.", hint=hint) from None
    return found


def kind_of(found: Any) -> str:
    """Which kind of result something is that was read; empty where it is none."""
    if not isinstance(found, dict):
        return ""
    kind = found.get("kind")
    return kind if isinstance(kind, str) and kind in RESULTS else ""


def check_shape(value: Any, shape: Shape, name: str = "") -> None:
    """Raise ValueError, with the place, where a value is not as it should be."""
    match shape:
        case (inner, None):
            if value is not None:
                check_shape(value, inner, name)
        case [row]:
            if not isinstance(value, list) or len(value) > MOST_ROWS:
                raise ValueError(f"{name} is no list of at most {MOST_ROWS:,}")
            for at, each in enumerate(value):
                check_shape(each, row, f"{name}[{at}]")
        case dict():
            if not isinstance(value, dict) or len(value) > MOST_ROWS:
                raise ValueError(f"{name or 'it'} is no object")
            before = f"{name}." if name else ""
            fields = dict.fromkeys(value, shape[str]) if str in shape else shape
            if str in shape and not all(map(text, value)):
                raise ValueError(f"a name in {name} is no short text")
            missing = [field for field, inner in fields.items() if field not in value and not isinstance(inner, tuple)]
            unknown = [field for field in value if field not in fields]
            if missing or unknown:
                wrong = f"{before}{missing[0]} is missing" if missing else f"{before}{unknown[0]} is not known"
                raise ValueError(wrong)
            for field, inner in fields.items():
                check_shape(value.get(field), inner, f"{before}{field}")
        case _ if not shape(value):
            raise ValueError(f"{name} is not {shape.__doc__ or 'as it should be'}")
