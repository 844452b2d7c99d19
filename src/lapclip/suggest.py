"""Commands that lapclip suggests: complete, and quoted so that they can be pasted as they are.

A run may come from somebody else, so nothing that its run.toml says is suggested in a form that
could run as code.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lapclip.config import SECTIONS, DataConfig, parse_settings
from lapclip.text import number, path_from_here

DRAWN = DataConfig().source  # the data of a run without DATA: lapclip draws it
LENGTHS = ("train.epochs", "train.steps", "train.minutes")  # only one of them counts
SETTINGS = {
    f"{section}.{field.name}" for section in SECTIONS for field in fields(SECTIONS[section])
}
NOT_FOR_READING = {"data.source", "data.stream", "data.tokenizer", "data.vocabulary"}


def quoted(word: str) -> str:
    """Return a word as a shell takes it unchanged, with "?" for what cannot be printed.

    On Windows both cmd and PowerShell take double quotes. What would end them, or run inside of
    them, becomes "?" as well.
    """
    word = "".join(letter if letter.isprintable() else "?" for letter in word)
    return _quoted_on_windows(word) if os.name == "nt" else shlex.quote(word)


def _quoted_on_windows(word: str) -> str:
    if re.fullmatch(r"[\w+=:./\\-]+", word, re.ASCII):
        return word
    word = re.sub(r'["`\u201c\u201d\u201e]|\$(?=[({])', "?", word)
    trailing = len(word) - len(word.rstrip("\\"))  # doubled, or they would escape the quote
    return f'"{word}{word[len(word) - trailing :]}"'


def command(*words: object) -> str:
    """Return the command `lapclip WORDS`. A `Path` that looks like an option becomes `./-name`."""
    texts = ["lapclip"]
    for word in words:
        text = str(word)
        if isinstance(word, Path) and text.startswith("-"):
            text = os.path.join(os.curdir, text)
        texts.append(text)
    return " ".join(map(quoted, texts))


def install(extra: str) -> str:
    """Return the command that installs an extra for this interpreter, from where lapclip came."""
    python = quoted(path_from_here(sys.executable or "python"))
    if find_spec("pip"):
        installer = f"{python} -m pip install"
    else:
        installer = f"uv pip install --python {python}"
    clone = Path(__file__).resolve().parents[2]
    if (clone / "pyproject.toml").exists():
        return f"{installer} --editable {quoted(f'{path_from_here(clone)}[{extra}]')}"
    origin = _origin()
    requirement = f"lapclip[{extra}] @ {origin}" if origin else f"lapclip[{extra}]"
    return f"{installer} {quoted(requirement)}"


def _origin() -> str:
    """Return the address that lapclip was installed from. Empty for a package registry."""
    try:
        record = json.loads(distribution("lapclip").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return ""
    commit = record.get("vcs_info")
    if commit:
        return f"{commit['vcs']}+{record['url']}@{commit['commit_id']}"
    return record.get("url", "")


def source_word(source: str) -> str:
    """Return a data source as typed here. A path never looks like an option or a built-in."""
    if not os.path.isabs(source):
        return source
    shown = path_from_here(source)
    if shown.startswith("-"):
        return os.path.join(os.curdir, shown)
    if os.sep not in shown and os.path.isdir(source):
        return os.path.join(shown, "")
    return shown


def model_word(reference: str) -> str:
    """Return a model as typed here. A path of one word could be a run's name and stays absolute."""
    shown = path_from_here(reference) if os.path.isabs(reference) else reference
    return shown if os.sep in shown and not shown.startswith("-") else reference


def set_words(settings: Mapping[str, Any]) -> list[str]:
    """Return `--set NAME=VALUE` for each setting."""
    words = []
    for name, value in settings.items():
        words += ["--set", f"{name}={_value_text(name, value)}"]
    return words


def train_command(saved: Mapping[str, Any], *changes: str, recipe: str = "", name: str = "") -> str:
    """Return the command for a run like the saved one (the content of its run.toml), with changes.

    With another recipe only data settings are kept: the others were meant for the old recipe.
    """
    changed = _whole_names(parse_settings(list(changes)).values)
    settings = _given(saved)
    if recipe:
        settings = {key: value for key, value in settings.items() if key.startswith("data.")}
    if any(length in changed for length in LENGTHS):
        settings = {key: value for key, value in settings.items() if key not in LENGTHS}
    settings |= changed
    data = _data_words(settings)
    minutes = number(settings.pop("train.minutes", 0))
    flags = {
        "--recipe": recipe or _recipe(saved),
        "--from": model_word(str(settings.pop("train.start", ""))),
        "--teacher": model_word(str(settings.pop("train.teacher", ""))),
        "--minutes": f"{minutes:g}" if minutes else "",
        "--name": name,
    }
    words = [word for flag, value in flags.items() if value for word in (flag, value)]
    return command("train", *data, *words, *set_words(settings))


def resume_command(name: str, saved: Mapping[str, Any]) -> str:
    """Return the command that continues a run, on as many computers as before."""
    machines = number(_section(saved, "join").get("machines")) or 0
    return command("resume", name, *(["--machines", f"{machines:.0f}"] if machines > 1 else []))


def tune_command(saved: Mapping[str, Any]) -> str:
    """Return the command that tunes the settings of a run again."""
    settings = {key: value for key, value in _given(saved).items() if key not in LENGTHS}
    data = _data_words(settings)
    recipe = ["--recipe", _recipe(saved)] if _recipe(saved) else []
    return command("tune", *data, *recipe, *set_words(settings))


def data_command(name: str, saved: Mapping[str, Any]) -> str:
    """Return `lapclip data NAME` for the data of a run, read as the run reads it."""
    reading = {}
    for key, value in _given(saved).items():
        if key.startswith("data.") and key not in NOT_FOR_READING:
            reading[key] = value
    return command("data", name, source_word(source_of(saved)), *set_words(reading))


def source_of(saved: Mapping[str, Any]) -> str:
    """Return the data source of a run."""
    return str(_given(saved).get("data.source") or _section(saved, "data").get("source") or DRAWN)


def _data_words(settings: dict[str, Any]) -> list[str]:
    """Take the data source out of the settings and return it as typed: nothing for the default."""
    source = str(settings.pop("data.source", DRAWN))
    return [] if source == DRAWN else [source_word(source)]


def _recipe(saved: Mapping[str, Any]) -> str:
    return str(_section(saved, "run").get("recipe") or "")


def _given(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user gave to a run."""
    recorded = _whole_names(_section(_section(saved, "run"), "asked"))
    return {name: value for name, value in recorded.items() if name in SETTINGS}


def _whole_names(sections: Mapping[str, Any]) -> dict[str, Any]:
    settings = {}
    for section in sections:
        for name, value in _section(sections, section).items():
            settings[f"{section}.{name}"] = value
    return settings


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _value_text(name: str, value: Any) -> str:
    """Return a value for --set: plain if that is read as the same value, else as TOML."""
    if isinstance(value, str):
        read = _whole_names(parse_settings([f"{name}={value}"]).values).values()
        if value in read:
            return value
    return json.dumps(value, ensure_ascii=False, default=str)
