"""`lapclip export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.model import have_model
from lapclip.cli.output import Common, emit, typed
from lapclip.exporting import find_format, known_formats

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(known_formats())]

FORMATS = ", ".join(f"`{name}` {format.purpose}" for name, format in known_formats().items())


def export(
    model: str | None = None,
    /,
    *,
    to: Annotated[FormatName, Parameter(help=f"{FORMATS}. Example: lapclip export --to onnx")],
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    force: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    yes: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Write a model as other programs load it, with its preprocessing and its tokenizer, and say what that cost.

    What is written is checked before it is called done: on held-out pairs, beside the model itself, for closeness,
    recall, size and speed.

    For example:

    - `lapclip export --to onnx-int8`
    - `lapclip export first-run --to onnx --out my-clip`
    - `lapclip export vit-b-32-laion2b --to onnx-int8`
    - `lapclip export ViT-B-32.pt --to openclip --out vit-b-32 --json`

    Parameters
    ----------
    model
        A run's name or folder, a folder or file with a model, a published one by its name (`lapclip models` lists
        them), or hf:org/name on the Hugging Face hub; without one, the newest run with a model.
    out
        The folder to write; whole or not at all. Without one, exported/FORMAT in the run's folder. Example: lapclip
        export --to openclip --out my-clip
    force
        Replace an earlier export there. Example: lapclip export --to openclip --out my-clip --force
    yes
        Fetch a published model without asking. Example: lapclip export vit-b-32-laion2b --to onnx --yes
    """
    with loading():
        from lapclip.commands.export import Callbacks
        from lapclip.commands.export import export as write_export

    have_model(model, yes=yes)
    with display() as shown:
        callbacks = Callbacks(shown.doing, shown.data_progress, shown.counting)
        result = write_export(model, to, out, force=force, callbacks=callbacks)
    emit(result, _lines(result), common)
    return 0


def _lines(result: dict[str, Any]) -> list[str]:
    from lapclip.exporting.export_folder import table_lines

    folder = Path(result["out"])
    lines = [
        f"[bold]{escape(str(folder))}[/bold]  {result['format']}, {result['bytes'] / 1e6:,.1f} MB"
    ]
    lines += [escape(line) for line in table_lines(result)]
    lines += [f"[dim]{escape(note)}[/dim]" for note in result["notes"]]
    if result["passed"] is False:
        lines.append(
            "[bold red]This export lost too much: less than 0.995 in cosine, or more than a point of R@1. Look at the "
            "table before you use it.[/bold red]"
        )
    step = find_format(result["format"]).next_step(folder)
    if step.startswith("lapclip "):
        step = typed(step.removeprefix("lapclip "))
    readme = escape(str(folder / "README.md"))
    lines.append(f"Next: {escape(f'{step}; ' if step else '')}{readme} says how others load it")
    return lines
