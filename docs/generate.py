"""Writes docs/commands.md from the help texts and docs/settings.md from config.py; a test checks both."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
from pathlib import Path

from lapclip import config
from lapclip.cli import app

HERE = Path(__file__).parent


def commands() -> str:
    """The command line reference, as the help texts say it."""
    text = app.generate_docs(output_format="markdown", heading_level=1)
    return "<!-- Made by docs/generate.py from the help texts; edit those. -->\n\n" + text.strip() + "\n"


def settings() -> str:
    """Every setting with its default and its meaning."""
    lines = ["<!-- Made by docs/generate.py from src/lapclip/config.py; edit that. -->", "", "# Settings", ""]
    lines += [
        "Each can be set in a recipe file, or with `--set section.field=value`. A field name that only one section"
    ]
    lines += ["has may stand alone: `--set batch_size=64`.", ""]
    for section, kind in config.SECTIONS.items():
        lines += [
            f"## {section}",
            "",
            (kind.__doc__ or "").strip(),
            "",
            "| field | default | meaning |",
            "|---|---|---|",
        ]
        meanings = _meanings(kind)
        for field in dataclasses.fields(kind):
            default = "as the named model has it" if field.default is dataclasses.MISSING else f"`{field.default}`"
            lines.append(f"| `{section}.{field.name}` | {default} | {meanings[field.name]} |")
        lines.append("")
    return "\n".join(lines)


def _meanings(kind: type) -> dict[str, str]:
    """The docstring under each field."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                found[name] = " ".join(meaning.split())
    return found


PAGES = {"commands.md": commands, "settings.md": settings}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in PAGES.items():
        (folder / name).write_text(make(), encoding="utf-8")
        print(folder / name)
