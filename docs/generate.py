"""Writes docs pages from the code: commands from the help texts, settings, events, and what doctor looks for.

A test checks that they are fresh.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
from pathlib import Path

from lapclip import config
from lapclip.cli.app import app
from lapclip.runs import events as recorded
from lapclip.runs.findings import CHECKS

HERE = Path(__file__).parent


EVENTS = f"""\
<!-- Made by docs/generate.py from src/lapclip/runs/events.py; edit that. -->

# Events

`events.jsonl` in a run's folder has one JSON object a line, appended as it happens and never changed. Each has `v`
(the version of this format, {recorded.VERSION}), `type` and `time` (seconds since 1970). Readers pass over a
half-written last line and ignore types and fields they do not know; of two events with the same step the later one
counts, because after a crash some steps are computed again.

A tracker of your own is a loop over that file:

```python
from lapclip.records.runs import find_run
from lapclip.records.tail import Tail

tail = Tail(find_run("first-run").events)
for event in tail.read():  # again later: only what is new
    if event["type"] == "step":
        print(event["step"], event["loss"])
```

`src/lapclip/training/trackers.py` writes TensorBoard's files that way, from inside the run.
"""


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


def events() -> str:
    """What each line of events.jsonl holds."""
    lines = [EVENTS]
    for kind in recorded.Event.__subclasses__():
        meanings = _meanings(kind)
        lines += [f"## {kind.type}", "", "| field | type | |", "|---|---|---|"]
        for field in dataclasses.fields(kind):
            lines.append(
                f"| `{field.name}` | `{str(field.type).replace('|', 'or')}` | {meanings.get(field.name, '')} |"
            )
        lines.append("")
    return "\n".join(lines)


def doctor() -> str:
    """What `lapclip doctor` looks for, as the checks say it."""
    return f"""\
<!-- Made by docs/generate.py from src/lapclip/runs/findings; edit that. -->

# What `lapclip doctor` looks for

`lapclip doctor` reads the events of the newest run, `lapclip doctor RUN` those of another, before, during and after
training. Each finding comes with the numbers that show it and a next step, usually a command; `lapclip watch` shows the
same findings as alarms. With no run here it checks the machine instead, as `lapclip machine` does.

An alarm needs a hand now, a warning costs quality or time, a note is good to know. Nothing is said before there is
enough to go by: what is too early to tell, or was not recorded, is not checked; `--all` lists both. The thresholds,
with the reason for each, are at the top of the files in `src/lapclip/runs/findings`.

| id | severity | what it says | when it counts |
|---|---|---|---|
{chr(10).join(f"| `{check.id}` | {check.severity} | {check.title} | {check.counts} |" for check in CHECKS)}

For scripts, `lapclip doctor --json` prints one object: `run` (null where there is none), `findings`, a list of objects
with `id`, `severity`, `title`, `evidence` and `next`, the gravest first, and `checked` and `not_checked`, the ids of
what was looked for and of what could not be. The exit status is 0 with and without findings.

In Python, without torch:

```python
from lapclip.runs.findings import findings, surroundings_of
from lapclip.runs.folder import find_run
from lapclip.runs.view import view_of

run = find_run("first-run")
for finding in findings(view_of(run).summary, surroundings_of(run)):
    print(finding.severity, finding.title, finding.evidence, finding.next, sep="\\n")
```
"""


PAGES = {"commands.md": commands, "settings.md": settings, "events.md": events, "doctor.md": doctor}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in PAGES.items():
        (folder / name).write_text(make(), encoding="utf-8")
        print(folder / name)
