"""`lapclip export`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display
from lapclip.cli.output import Common, emit, typed


def export(
    model: str | None = None,
    /,
    *,
    to: Literal["onnx", "onnx-int8", "coreml", "coreml-int8", "openclip", "huggingface"],
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    force: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Write a model as other programs load it, with its preprocessing and its tokenizer, and say what that cost.

    What is written is checked before it is called done: on held-out pairs, beside the model itself, for closeness,
    recall, size and speed.

    For example:

    - `lapclip export --to onnx-int8`
    - `lapclip export first-run --to onnx --out my-clip`
    - `lapclip export ViT-B-32.pt --to openclip --out vit-b-32 --json`

    Parameters
    ----------
    model
        A run's name or folder, a folder or file with a model, or a name on the Hugging Face hub; without one, the
        newest run.
    to
        `onnx` for ONNX Runtime, `onnx-int8` for a quarter of the size and less time, `coreml` and `coreml-int8` for
        Apple's devices, `openclip` for open_clip.create_model_and_transforms, `huggingface` for transformers'
        CLIPModel. Example: lapclip export --to onnx
    out
        The folder to write; whole or not at all. Without one, exported/FORMAT in the run's folder. Example: lapclip
        export --to openclip --out my-clip
    force
        Replace an earlier export there. Example: lapclip export --to openclip --out my-clip --force
    """
    from lapclip.commands import export as shipping

    with display() as shown:
        told = shipping.Shown(shown.doing, shown.data_progress, shown.counting)
        result = shipping.export(model, to, out, force=force, shown=told)
    emit(result, _account(result), common)
    return 0


def _account(result: dict[str, Any]) -> list[str]:
    from lapclip.exporting.readme import table_lines

    place = Path(result["out"])
    lines = [f"[bold]{escape(str(place))}[/bold]  {result['format']}, {result['bytes'] / 1e6:,.1f} MB"]
    lines += [escape(line) for line in table_lines(result)]
    lines += [f"[dim]{escape(note)}[/dim]" for note in result["notes"]]
    if result["passed"] is False:
        lines.append(
            "[bold red]This export lost too much: less than 0.995 in cosine, or more than a point of R@1. Look at the "
            "table before you use it.[/bold red]"
        )
    readme = escape(str(place / "README.md"))
    example, folder = shlex.quote(str(place / "example.py")), shlex.quote(str(place))
    following = {"onnx": f"python {example} PICTURE CAPTION ...; ", "core": ""}
    known = following.get(result["format"][:4], f"{typed(f'eval {folder} DATA')}; ")
    lines.append(f"Next: {escape(known)}{readme} says how others load it")
    return lines
