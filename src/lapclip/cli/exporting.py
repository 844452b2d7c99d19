"""`lapclip export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.output import Common, emit, typed
from lapclip.cli.progress import display


def export(
    model: str | None = None,
    /,
    *,
    to: Literal["openclip", "huggingface"],
    out: Path,
    force: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Write a model as other programs load it, with its preprocessing and its tokenizer.

    For example:

    - `lapclip export --to huggingface --out my-clip`
    - `lapclip export first-run --to openclip --out my-clip`
    - `lapclip export ViT-B-32.pt --to openclip --out vit-b-32 --json`

    Parameters
    ----------
    model
        A run's name or folder, a folder or file with a model, or a name on the Hugging Face hub; without one, the
        newest run.
    to
        `openclip` for open_clip.create_model_and_transforms, `huggingface` for transformers' CLIPModel. Example:
        lapclip export --to openclip --out my-clip
    out
        The folder to write; whole or not at all. Example: lapclip export --to openclip --out my-clip
    force
        Replace an earlier export there. Example: lapclip export --to openclip --out my-clip --force
    """
    from lapclip.export import published

    with display() as shown:
        shown.waiting(f"writing {out}")
        result = published.export(model, to, out, force=force)
    lines = [f"[bold]{escape(str(out))}[/bold]  {result['bytes'] / 1e6:,.1f} MB, read back and equal"]
    lines += [f"  {escape(Path(path).name)}" for path in result["files"]]
    lines += [f"[dim]{escape(note)}[/dim]" for note in result["notes"]]
    lines.append(f"Next: {typed(f'eval {out} DATA')}; {out / 'README.md'} says how others load it")
    emit(result, lines, common)
    return 0
