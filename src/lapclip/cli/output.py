"""What commands share: the arguments they were given, --json and --debug, and how a result is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.prompt import Confirm
from rich.table import Table

from lapclip.errors import ConfigError
from lapclip.suggest import quoted
from lapclip.text import to_json, without_controls

ARGUMENTS: ContextVar[tuple[str, ...]] = ContextVar("arguments")
"""The arguments that this process was given after `lapclip`."""


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False
    """Print one JSON object to stdout; everything for people goes to stderr."""
    debug: Annotated[bool, Parameter(negative="", show_default=False)] = False
    """Show the traceback of an error."""


def typed(arguments: str) -> str:
    """A command as it can be typed here, with or without `lapclip` before it (`lapclip.suggest.command` makes them):
    `make` installs lapclip into .venv, which is rarely on the path."""
    return f"{_program()} {arguments.removeprefix('lapclip ')}"


def typed_in(text: str) -> str:
    """A sentence whose commands can be typed here."""
    return re.sub(r"(?<!\S)lapclip (?=[a-z])", lambda _: f"{_program()} ", text)


def _program() -> str:
    if shutil.which("lapclip"):
        return "lapclip"
    program = Path(sys.argv[0])
    with suppress(ValueError):
        program = program.relative_to(Path.cwd())
    # PowerShell does not run a program whose path is in quotes.
    is_typed_alike = os.name != "nt" or " " not in str(program)
    if program.stem == "lapclip" and is_typed_alike:
        return quoted(str(program))
    return "python -m lapclip"


def emit(result: dict[str, Any], summary: Sequence[str | Table], common: Common | None) -> None:
    """Print the result: as JSON for scripts, or as a few lines for people."""
    if common and common.json:
        print(to_json(result))
        return
    console = Console(highlight=False)
    for text in summary:
        # Names of files may hold what steers a terminal.
        text = without_controls(text) if isinstance(text, str) else text
        console.print(text, soft_wrap=isinstance(text, str))


def confirmed(question: str, refusal: str, common: Common | None) -> bool:
    """Ask a person; a script has to say --yes, and is told what was not done."""
    if not (sys.stdin and sys.stdin.isatty()) or (common and common.json):
        raise ConfigError(refusal, hint="the same command with --yes")
    return Confirm.ask(question, default=False, console=Console(stderr=True, highlight=False))


def source_setting(data: str | None) -> list[str]:
    """The data as a setting, with a path that still leads there from another folder, as when a run is resumed."""
    if data is None:
        return []
    from lapclip.data.sources import absolute  # brings numpy

    return [f"data.source={json.dumps(absolute(data), ensure_ascii=False)}"]
