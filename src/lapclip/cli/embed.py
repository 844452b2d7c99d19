"""`lapclip embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.model import have_model
from lapclip.cli.output import Common, emit
from lapclip.text import counted, duration, printable


def embed(
    data: str,
    /,
    *,
    out: Path,
    model: Annotated[str | None, Parameter(show_default=False)] = None,
    split: Annotated[str | None, Parameter(show_default=False)] = None,
    device: str = "auto",
    settings: Annotated[
        tuple[str, ...], Parameter(name="--set", negative="", show_default=False)
    ] = (),
    yes: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Write the vectors of images and captions to a file for other programs: a vector database, a notebook.

    Ctrl-C stops it, and the same command goes on, from FILE.unfinished beside the file. A finished file is replaced
    only by a whole one. Where neither images nor model have changed, nothing is done again. Images that cannot be read
    are left out and listed.

    For example:

    - `lapclip embed photos/ --out photos.parquet`
    - `lapclip embed photos/ --model heads --out photos.npy --json`
    - `lapclip embed photos/ --model vit-b-32-laion2b --out photos.parquet`
    - `lapclip embed captions.csv --split test --out test.npy`
    - `lapclip embed clothes/ --set "data.prompts=a photo of a {}." --out clothes.parquet`

    Parameters
    ----------
    data
        Images with captions, as `lapclip train` reads them, or a folder of images without. Folders in it count as
        classes, with captions of their names, only where data.prompts is set.
    out
        The file. `.parquet`: a row an image, with `path`, `captions`, `split`, `vector` and `caption_vectors`; `.npy`:
        the vectors of images, with those of captions in NAME-captions.npy and the names in NAME.json. Example: lapclip embed photos/ --out photos.parquet
    model
        A run's name or folder, a folder or file with a model, an exported folder, a published one by its name
        (`lapclip models` lists them), or hf:org/name on the Hugging Face hub. Without one: the model that made the
        file that is there, because vectors of two models cannot be compared; else the newest finished run that
        learned from images, as `lapclip search` takes it. Example: lapclip embed photos/ --model
        vit-b-32-laion2b --out photos.parquet
    split
        Only images of this split, where the data itself names splits. Example: lapclip embed captions.csv --split test
        --out test.npy
    device
        Where to compute: auto, cpu, cuda, mps, xpu. Example: lapclip embed photos/ --device cpu --out photos.npy
    settings
        How to read the data; may be repeated. Example: lapclip embed a.csv --set data.caption_column=title --out a.npy
    yes
        Fetch a published model without asking. Example: lapclip embed photos/ --model vit-b-32-laion2b --out a.npy
        --yes
    """
    with loading():
        from lapclip.commands.embed import Callbacks, EmbedOptions
        from lapclip.commands.embed import embed as embed_data

    have_model(model, yes=yes)
    request = EmbedOptions(data, out, model, device, split, settings)
    with display() as shown:
        callbacks = Callbacks(shown.doing, shown.data_progress, shown.counting("embedding images"))
        result = embed_data(request, callbacks)
    emit(result, _lines(result), common)
    return 0


def _lines(result: dict[str, Any]) -> list[str]:
    captions = f" and {counted(result['captions'], 'caption')}" if result["captions"] else ""
    what = f"{counted(result['rows'], 'image')}{captions}, {result['dimension']} numbers each"
    lines = [
        f"[bold]{escape(printable(result['file']))}[/bold]  {what}, {result['bytes'] / 1e6:,.1f} MB"
    ]
    lines += [f"[dim]{escape(printable(note))}[/dim]" for note in result["notes"]]
    which = f"model {result['model']}: {result['why_model']}; fingerprint {result['fingerprint']}"
    lines.append(f"[dim]{escape(printable(which))}[/dim]")
    if result["embedded"]:
        rate = result["embedded"] / max(result["seconds"], 1e-9)
        took = f"{counted(result['embedded'], 'image')} in {duration(result['seconds'])}, {rate:,.0f} a second"
        lines.append(f"[dim]{took}[/dim]")
    return [*lines, f"Next, in Python: {escape(_how_to_load(result['file']))}"]


def _how_to_load(file: str) -> str:
    ending = Path(file).suffix.lower()
    if ending == ".parquet":
        return f"pandas.read_parquet({file!r})"
    return f"numpy.load({file!r})"
