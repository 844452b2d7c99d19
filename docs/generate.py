"""Writes docs pages from the code: commands from the help texts, settings, events, what doctor looks for, and Python.

Also the glossary, from dev/GLOSSARY.md, and llms.txt, a list of all pages for programs that read, from mkdocs.yml and
each page's first lines. A test checks that they are fresh.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from pathlib import Path

import lapclip
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
from lapclip.runs.folder import find_run
from lapclip.runs.follow import Tail

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
    _, options = text.split("## Table of Contents", 1)
    return f"""\
<!-- Made by docs/generate.py from the help texts; edit those. -->

# Commands

Every command with all its options, as `lapclip COMMAND --help` says them. Every command also takes `--json`, which
prints one object for scripts ([JSON](json.md)), and `--debug`, which shows the traceback of an error.

{options.strip()}
"""


def settings() -> str:
    """Every setting with its default and its meaning."""
    lines = [
        "<!-- Made by docs/generate.py from src/lapclip/config.py; edit that. -->",
        "",
        "# Settings",
        "",
    ]
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
            default = (
                "as the named model has it"
                if field.default is dataclasses.MISSING
                else f"`{field.default}`"
            )
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
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(meaning))
            ):
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
same findings as alarms.

An alarm needs a hand now, a warning costs quality or time, a note is good to know. Nothing is said before there is
enough to go by: what is too early to tell, or was not recorded, is not checked. The thresholds,
with the reason for each, are at the top of the files in `src/lapclip/runs/findings`.

| id | severity | what it says | when it counts |
|---|---|---|---|
{chr(10).join(f"| `{check.id}` | {check.severity} | {check.title} | {check.counts} |" for check in CHECKS)}

For scripts, `lapclip doctor --json` prints one object: `run` and `findings`, a list of objects with `id`, `severity`,
`title`, `evidence` and `next`, the gravest first. The exit status is 0 with and without findings.

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


PYTHON = """\
<!-- Made by docs/generate.py from the docstrings in src/lapclip; edit those. -->

# lapclip in Python

Scripts and notebooks do what the commands do, with the same code, the same files and the same refusals.

```python
import lapclip

run = lapclip.train("photos/", minutes=10)  # or pairs, a frame, a data set, or nothing
run.metrics["t2i_r1"]  # held-out recall, with intervals and chance beside it
run.plot()  # accuracy and recall, below the cell
run.model.classify("cat.jpg", ["cat", "dog"])
lapclip.search("holiday/", run).ask("a boat at sunset")
```

`examples/first_run.ipynb` is a notebook that trains, plots and asks; `examples/own_loop.py` is a training loop of one's
own. `import lapclip` takes milliseconds: torch is loaded by what needs it.

**Data in memory.** Pairs, frames and data sets are first written to `runs/.data/`, as a folder with a `captions.jsonl`
that every command reads. It is named after its content, so the same data is kept once, however often a cell is run; a
data set that changes its images at random is other data each time. A run that is resumed in another process, days
later, finds what it began with, also where the folder around `runs/` was moved meanwhile: its losses are those of a run
that was never interrupted. Where all images are given as paths they are not copied, and have to stay where they are;
they are copied where some are in memory, or where they lie on two drives of Windows. Images in memory are copied as the
files they are where they come as bytes or from Hugging Face, else as PNG, which loses nothing. `lapclip clean --caches`
removes what no run there learnt from.

**Interrupts.** Ctrl-C and a notebook's stop button let the step end, save, and raise `lapclip.Interrupted`, so that the
cells after it do not run; `lapclip.resume()` goes on. A second one ends at once; then the run goes on from its last
checkpoint. SIGTERM saves as well, and ends the process. In a thread that is not the main one Python has no signals:
there `lapclip stop` ends a run, or a callback that raises `lapclip.StopTraining`; `lapclip.train` then gives back the
run with the state `stopped`.

**Callbacks** are called with every event, as `events.jsonl` gets it ([events](events.md)), in the thread that trains:

```python
def tell(event: lapclip.events.Event) -> None:
    match event:
        case lapclip.events.Step(step=step, loss=loss):
            print(step, loss)
        case lapclip.events.Evaluation(evaluation=found) if found["t2i_r1"] > 0.5:
            raise lapclip.StopTraining("good enough")


lapclip.train(callbacks=[tell])
```

A callback that raises anything else does not cost you the run: there is a `RuntimeWarning` with the traceback, and it
is not called any more.

**Threads and processes.** A process trains one run at a time; a second one is refused (`lapclip.errors.RunBusy`). While
`lapclip.train` runs in another thread, what torch has for the whole process is the run's: the number of threads, the
default precision (float32) and whether algorithms are deterministic. After a run, all of it is as before. The current
folder must stay the same until a run has ended, because `runs/` is in it. Nothing uses `multiprocessing`, so scripts
need no `if __name__ == "__main__":` on Windows and macOS. Notebooks need no extension.

**Errors** are those of the commands (`lapclip.errors`, all of them `lapclip.LapclipError`): what is wrong and where,
and after "Try:" what to do, in the words of the command line. `--set train.batch_size=64` there is
`settings={"train.batch_size": 64}` here, or `settings={"train": {"batch_size": 64}}`, and other options are arguments
of the same name.

**Types.** The package is typed (`py.typed`). In what follows `Data` is any form of data that `lapclip.train` lists;
`Model` is a run's name or folder, a `TrainingRun`, a folder or file with a model, a published model's name, or a model
that `lapclip.load` gave and that has not changed since; `Settings` is a dictionary of settings by their names or by
section ([settings](settings.md)); `OneImage` is an image in any form that `encode_image` lists, and `ManyImages` are
several.
"""


FUNCTIONS = (
    "train",
    "resume",
    "open_run",
    "load",
    "evaluate",
    "search",
    "export",
    "tune",
    "connect",
)
TYPES = ("TrainingRun", "Encoder", "Embedder", "FolderSearch", "Found", "Evaluation", "Callback", "StopTraining",
         "Interrupted", "Client", "LapclipError")  # fmt: skip
INSIDE = ("embed_pixels", "embed_tokens", "image_fingerprint", "summary", "description")
"""Methods that only lapclip itself calls."""


def python() -> str:
    """What `import lapclip` offers, as the docstrings say it. Read from the source: nothing is imported."""
    found = {
        node.name: node
        for home, names in lapclip._HOMES.items()
        for node in _module(home).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    }
    assert sorted(found) == sorted((*FUNCTIONS, *TYPES)), "a public name is not in the page"
    lines = [PYTHON]
    for title, names in (("Functions", FUNCTIONS), ("Types", TYPES)):
        lines.append(f"## {title}\n")
        for name in names:
            lines += _entry(found[name], name)
    about, _, table = (ast.get_docstring(_module("lapclip.parts")) or "").partition("\n\n    ")
    return "\n".join(
        [*lines, "## lapclip.parts\n", about, "", f"```\n{inspect.cleandoc(table)}\n```", ""]
    )


def _module(name: str) -> ast.Module:
    path = HERE.parent / "src" / Path(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _entry(node: ast.FunctionDef | ast.ClassDef, name: str) -> list[str]:
    """A function, or a class with its methods and properties."""
    lines = [f"### lapclip.{name}\n"]
    if isinstance(node, ast.FunctionDef):
        lines.append(f"```python\n{_signature(node, name)}\n```\n")
    lines += [*_sections(ast.get_docstring(node) or ""), ""]
    for part in node.body if isinstance(node, ast.ClassDef) else []:
        if (
            not isinstance(part, ast.FunctionDef)
            or part.name.startswith("_")
            or not ast.get_docstring(part)
        ):
            continue
        if part.name in INSIDE:
            continue
        marks = {mark.id for mark in part.decorator_list if isinstance(mark, ast.Name)}
        if marks & {"property", "cached_property"}:
            returns = f": {ast.unparse(part.returns)}" if part.returns else ""
            lines += [
                f"**`{part.name}{returns}`**\n",
                *_sections(ast.get_docstring(part) or ""),
                "",
            ]
        else:
            lines += [f"**`{part.name}`**\n", f"```python\n{_signature(part, part.name)}\n```\n"]
            lines += [*_sections(ast.get_docstring(part) or ""), ""]
    return lines


def _signature(node: ast.FunctionDef, name: str) -> str:
    """A function as it is called, on one line or with a line for each argument."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults)) + [
        *given.defaults
    ]
    texts = [
        _argument(*pair) for pair in zip(positional, defaults, strict=True) if pair[0].arg != "self"
    ]
    if given.vararg:
        texts.append(f"*{_argument(given.vararg, None)}")
    if given.kwonlyargs:
        texts += [
            *["*"] * (given.vararg is None),
            *(_argument(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)),
        ]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    whole = f"{name}({', '.join(texts)}){returns}"
    return (
        whole
        if len(whole) <= 100
        else f"{name}(\n{''.join(f'    {text},{chr(10)}' for text in texts)}){returns}"
    )


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{kind}" + (f" = {ast.unparse(default)}" if default is not None else "")


def _sections(docstring: str) -> list[str]:
    """A docstring as Markdown: its parameters as a list, its example as code."""
    text, _, example = docstring.partition("\nFor example:\n")
    text, _, given = text.partition("\nParameters\n----------\n")
    lines = [text.rstrip()]
    if given:
        lines.append("")
        for line in given.rstrip().splitlines():
            if line.startswith(" "):
                lines[-1] += f" {line.strip()}"
            else:
                lines.append(f"- {', '.join(f'`{name}`' for name in line.split(', '))}:")
    if example:
        lines += ["", f"```python\n{inspect.cleandoc(example)}\n```"]
    return lines


GLOSSARY = """\
<!-- Made by docs/generate.py from dev/GLOSSARY.md; edit that. -->

# Glossary

The words of these pages, of the messages and of the code, in the order of the alphabet.

| word | meaning |
|---|---|
"""


def glossary() -> str:
    """The words with their meanings, without the files that developers find them in."""
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| .* \|$",
        (HERE.parent / "dev" / "GLOSSARY.md").read_text("utf-8"),
        re.M,
    )
    listed = [f"| {word} | {meaning} |" for word, meaning in rows if word != "word"]
    return GLOSSARY + "\n".join(sorted(listed, key=str.casefold)) + "\n"


def llms() -> str:
    """Every page with what it is for, in the order of the site; https://llmstxt.org has the form."""
    site = (HERE.parent / "mkdocs.yml").read_text("utf-8")
    facts = dict(re.findall(r"^(site_\w+): (.+)$", site, re.M))
    lines = [f"# {facts['site_name']}", "", f"> {facts['site_description']}"]
    for indent, title, page in re.findall(
        r"^( +)- (.+?):(?: (\w+\.md))?$", site[site.index("\nnav:") :], re.M
    ):
        lines += ["", f"## {title}", ""] if len(indent) == 2 else []
        lines += [f"- [{title}]({page}): {_purpose(page)}"] if page else []
    return "\n".join(lines) + "\n"


def _purpose(page: str) -> str:
    """The first sentence of a page that is no heading, comment, code, picture or table."""
    made = PAGES[page]() if page in PAGES else (HERE / page).read_text("utf-8")
    prose = re.sub(r"<!--.*?-->|^```.*?^```$", "", made, flags=re.S | re.M)
    paragraph = next(
        text for text in prose.split("\n\n") if text.strip() and text.strip()[0] not in "#|!"
    )
    plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=\.)\s", plain)[0].rstrip(":")


def linked(text: str) -> str:
    """Pages that docstrings name by their path, as links."""
    return re.sub(r"`?docs/(\w+)\.md`?", r"[\1](\1.md)", text)


PAGES = {
    "commands.md": lambda: linked(commands()),
    "settings.md": lambda: linked(settings()),
    "events.md": events,
    "doctor.md": doctor,
    "glossary.md": glossary,
    "python.md": lambda: linked(python()),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in {**PAGES, "llms.txt": llms}.items():
        (folder / name).write_text(make(), encoding="utf-8")
        print(folder / name)
