"""Commands that lapclip suggests: with all that the user gave, and quoted, so that they can be typed as they stand.

`command` makes any of them, `resume_command` the one that goes on with a run. `train_command` makes that of another run
from the settings of one that was there: the same data, recipe, model to start from, teacher and settings, with some of
them changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lapclip.config import DataConfig, parse_settings
from lapclip.shell import program, quoted
from lapclip.text import number, path_from_here

DRAWN = DataConfig().source
"""The data of who names none: drawn by lapclip, so that a command need not name it."""
FACTORY = "MODULE:FUNCTION"
LENGTHS = ("train.epochs", "train.steps", "train.minutes")
"""How long a run is: one of them decides, so that a new one replaces what was given before."""
CHOSEN = ("stream", "tokenizer", "vocabulary")
"""Settings of data that a run may have chosen by itself."""
READING = tuple(f"data.{field.name}" for field in fields(DataConfig) if field.name not in CHOSEN)
RECORDED = ("train.start", "train.teacher", "train.minutes")
"""What runs have always recorded as it was given."""


def command(*words: object) -> str:
    """`lapclip` and these words, as they are typed. A `Path` forgets the `./` by which it was no option."""
    texts = (
        f"{os.curdir}{os.sep}{word}"
        if isinstance(word, Path) and str(word)[0] == "-"
        else str(word)
        for word in words
    )
    return " ".join(("lapclip", *map(quoted, texts)))


def install(extra: str) -> str:
    """The command that brings the packages of an extra to where lapclip is installed: with the program that installed
    it, and from where it came, which is a clone, a file, an address, or else the registry."""
    if os.path.exists(receipt := os.path.join(sys.prefix, "uv-receipt.toml")):
        # uv makes a tool's environment anew: what is not named again is gone, and torch would be the registry's.
        extras, build = {*_extras_of_tool(receipt), extra}, _torch_build()
        backend = f"--torch-backend {build} " if build else ""
        return f"uv tool install {backend}{_itself(','.join(sorted(extras)))}"
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return f"pipx runpip lapclip install {_itself(extra)}"
    return f"{_installer()} {_itself(extra)}"


def _installer() -> str:
    """How packages are installed for this very interpreter, which need not be the one that `pip` belongs to."""
    python = sys.executable or "python"
    named = shutil.which("python")
    if named and os.path.dirname(named) == os.path.dirname(python):
        python = "python"
    elif os.sep in (near := path_from_here(python)):
        python = near
    if find_spec("pip"):
        return f"{program(python)} -m pip install"
    return f"uv pip install --python {quoted(python)}"


def _itself(extras: str) -> str:
    """lapclip with these extras, as pip and uv take it."""
    clone = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.exists(os.path.join(clone, "pyproject.toml")):
        return f"--editable {_double_quoted(f'{os.curdir if path_from_here(clone) == os.curdir else clone}[{extras}]')}"
    origin = _origin()
    return _double_quoted(f"lapclip[{extras}] @ {origin}" if origin else f"lapclip[{extras}]")


def _origin() -> str:
    """The address of the file or repository that lapclip was installed from; empty for what a registry gave."""
    try:
        told = json.loads(distribution("lapclip").read_text("direct_url.json") or "{}")
        commit = told.get("vcs_info")
        return (
            f"{commit['vcs']}+{told['url']}@{commit['commit_id']}"
            if commit
            else told.get("url", "")
        )
    except (PackageNotFoundError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def _extras_of_tool(receipt: str) -> list[str]:
    try:
        with open(receipt, "rb") as file:
            asked = tomllib.load(file)["tool"]["requirements"]
        return [
            extra for each in asked if each["name"] == "lapclip" for extra in each.get("extras", ())
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _torch_build() -> str:
    """What uv calls the build of torch that is here, as `cpu` or `cu130`; empty for the registry's own."""
    try:
        build = version("torch").partition("+")[2]
    except PackageNotFoundError:
        return ""
    return build if re.fullmatch(r"cpu|cu\d+|rocm[\d.]+|xpu", build) else ""


def _double_quoted(word: str) -> str:
    """In double quotes, which every shell takes, unless it holds what some shell would read inside them."""
    return quoted(word) if re.search(r'["$`%!^]', word) else f'"{word}"'


def source_word(source: str) -> str:
    """A source of data as it is typed here, which is no built-in source's name and no option where it is a path."""
    if not os.path.isabs(source):
        return source
    shown = path_from_here(source)
    if shown.startswith("-"):
        return os.path.join(os.curdir, shown)
    return os.path.join(shown, "") if os.sep not in shown and os.path.isdir(source) else shown


def model_word(reference: str) -> str:
    """A model as it is typed here. One word alone might be a run's name as well, so that such a path stays whole."""
    shown = path_from_here(reference) if os.path.isabs(reference) else reference
    return shown if os.sep in shown and not shown.startswith("-") else reference


def set_words(settings: Mapping[str, Any]) -> list[str]:
    """The words that give these settings, each by its whole name."""
    return [
        word
        for name, value in settings.items()
        for word in ("--set", f"{name}={_value_text(name, value)}")
    ]


def train_command(saved: Mapping[str, Any], *changes: str, recipe: str = "", name: str = "") -> str:
    """The command for another run like the one whose run.toml says this, with settings changed, as `train.epochs=3`.

    With another recipe only the data and how it is read stay: other settings were meant for the recipe that was.
    """
    changed = _whole_names(parse_settings(list(changes)).values)
    replaced = LENGTHS if any(length in changed for length in LENGTHS) else ()
    given = {
        key: value for key, value in _given(saved).items() if not recipe or key.startswith("data.")
    }
    settings = {key: value for key, value in given.items() if key not in replaced} | changed
    source, minutes = (
        str(settings.pop("data.source", DRAWN)),
        number(settings.pop("train.minutes", 0)),
    )
    flags = {
        "--recipe": recipe or _recipe(saved),
        "--from": model_word(str(settings.pop("train.start", ""))),
        "--teacher": model_word(str(settings.pop("train.teacher", ""))),
        "--minutes": f"{minutes:g}" if minutes else "",
        "--name": name,
    }
    data = [source_word(source)] if source != DRAWN else []
    flagged = [word for flag, value in flags.items() if value for word in (flag, value)]
    return command("train", *data, *flagged, *set_words(settings))


def resume_command(name: str, saved: Mapping[str, Any]) -> str:
    """The command that goes on with a run as its run.toml says that it was trained: with as many computers, or
    alone."""
    machines = number(_section(saved, "together").get("machines")) or 0
    return command("resume", name, *(["--machines", f"{machines:.0f}"] if machines > 1 else []))


def tune_command(saved: Mapping[str, Any]) -> str:
    """The command that times settings afresh for a run like this one."""
    settings = {key: value for key, value in _given(saved).items() if key not in LENGTHS}
    source = str(settings.pop("data.source", DRAWN))
    data = [source_word(source)] if source != DRAWN else []
    recipe = ["--recipe", _recipe(saved)] if _recipe(saved) else []
    return command("tune", *data, *recipe, *set_words(settings))


def data_command(name: str, saved: Mapping[str, Any]) -> str:
    """`lapclip data NAME` for the data of a run, read as the run reads it."""
    reading = {
        key: value
        for key, value in _given(saved).items()
        if key in READING and key != "data.source"
    }
    return command("data", name, source_word(source_of(saved)), *set_words(reading))


def source_of(saved: Mapping[str, Any]) -> str:
    """What a run learns from."""
    return str(_given(saved).get("data.source") or _section(saved, "data").get("source") or DRAWN)


def _recipe(saved: Mapping[str, Any]) -> str:
    return str(_section(saved, "run").get("recipe") or "")


def _given(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the user gave to a run. One that did not record them keeps its data and how that is read, what
    it started from, its teacher and its minutes."""
    asked = _section(saved, "run").get("asked")
    if isinstance(asked, Mapping):
        # A run may come from elsewhere, and a factory that is typed is code that runs: who knows it fills it in.
        return {
            name: FACTORY if _is_factory(name, value) else value
            for name, value in _whole_names(asked).items()
        }
    usual = vars(DataConfig())
    known = {
        "data": {n: v for n, v in _section(saved, "data").items() if v != usual.get(n)},
        "train": saved.get("train"),
    }
    kept = {*READING, *RECORDED} - {
        "data.split_rule"
    }  # an older run keeps its rule, and a new one takes the better
    return {name: value for name, value in _whole_names(known).items() if name in kept}


def _is_factory(name: str, value: Any) -> bool:
    return (
        name in ("model.image_from", "model.text_from")
        and re.match(r"(?!timm:|hf:)[\w.]+:", str(value)) is not None
    )


def _whole_names(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{at}.{name}": value for at in sections for name, value in _section(sections, at).items()
    }


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _value_text(name: str, value: Any) -> str:
    """A value as --set reads it: plain where that is read as the same, else as TOML writes it."""
    if (
        isinstance(value, str)
        and value in _whole_names(parse_settings([f"{name}={value}"]).values).values()
    ):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
