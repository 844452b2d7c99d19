"""Commands that a sentence suggests, and whether each of them can be typed."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence

from lapclip.cli.app import app
from lapclip.config import build_config, parse_settings, read_recipe
from lapclip.model.shapes import SHAPES

COMMAND = re.compile(r"(?<!\S)lapclip ((?:'[^']*'|[;,](?=\S)|[^;,'\n])+)")
"""Up to the end of a clause: a comma or a semicolon before a space, unless it is quoted."""


def commands_in(text: str) -> list[list[str]]:
    """The words of each command in a sentence, without `lapclip`."""
    return [shlex.split(found[1]) for found in COMMAND.finditer(text)]


def check_command(words: Sequence[str]) -> None:
    """Raise unless the command line takes these words, and the recipe and the settings they name exist."""
    app.parse_args(list(words), exit_on_error=False, print_error=False)
    settings = [after for word, after in itertools.pairwise(words) if word == "--set"]
    recipes = [
        read_recipe(after) for word, after in itertools.pairwise(words) if word == "--recipe"
    ]
    build_config([*recipes, parse_settings(settings)], SHAPES)
