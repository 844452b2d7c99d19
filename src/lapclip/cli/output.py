"""What commands share: --json and --debug, and how a result is printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    json: Annotated[bool, Parameter(negative="")] = False
    """Print one JSON object to stdout; everything for people goes to stderr."""
    debug: Annotated[bool, Parameter(negative="")] = False
    """Show the traceback of an error."""


def emit(result: dict[str, Any], summary: list[str], common: Common | None) -> None:
    """Print the result: as JSON for scripts, or as a few lines for people."""
    if common and common.json:
        print(json.dumps(result))
        return
    console = Console(highlight=False)
    for text in summary:
        console.print(text, soft_wrap=True)
