"""`lapclip model`, the shape of a named model, and `lapclip models`, those that others publish."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display
from lapclip.cli.output import Common, emit, typed
from lapclip.errors import ConfigError, nearest
from lapclip.suggest import command
from lapclip.text import UNKNOWN, parameters, percent, size

if TYPE_CHECKING:
    from rich.table import Table

    from lapclip.config import ModelConfig
    from lapclip.weights.published_models import PublishedModel


def model(name: str, /, *, common: Common | None = None) -> int:
    """Show the shape of a named model and count its parameters.

    For example:

    - `lapclip model seed`
    - `lapclip model vit-b-32 --json`

    Parameters
    ----------
    name
        mini, tiny, photos, photos-large, seed, seed-as-written, vit-b-32, vit-b-16, siglip-base-patch16-224,
        siglip-so400m-patch14-384, siglip2-base-patch16-224, siglip2-base-patch32-256 or towers (two pretrained ones).
    """
    from lapclip.model.shapes import named_shape

    shape = named_shape(name)
    counts = count_parameters(shape)
    lines = [f"[bold]{name}[/bold]  {counts['parameters']:,} parameters"]
    lines += [f"  {what:<18}{counts[f'{what}_parameters']:>14,}" for what in ("image", "text")]
    lines += [
        f"  {field:<18}{value:>14,}"
        for field, value in asdict(shape).items()
        if isinstance(value, int) and value
    ]
    how = {"mini": "train", "tiny": "train --set model.name=tiny", "seed": "train --recipe seed"}
    emit({"name": name, **counts}, [*lines, f"Next: {typed(how.get(name, 'model mini'))}"], common)
    return 0


def count_parameters(shape: ModelConfig) -> dict[str, int]:
    """How many parameters a model and its towers have: from its shape, which takes no torch; where pretrained towers
    make the model, by opening them."""
    if shape.image_from or shape.text_from:
        from lapclip.model import clip
        from lapclip.training.initial_weights import open_towers

        built = open_towers(shape)[0]
        whole, image, text = map(clip.count_parameters, (built, built.image, built.text))
    else:
        from lapclip.model import sizes

        counts = sizes.count_weights(shape), sizes.count_image(shape), sizes.count_text(shape)
        whole, image, text = (count.every for count in counts)
    return {"parameters": whole, "image_parameters": image, "text_parameters": text}


def models(
    *names: str,
    yes: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """List published models that work here by their short names, or fetch some of them.

    Every command that takes a model takes these names: search, embed, serve, eval, export, and `train --from`. The
    first use asks before it fetches a model; from then on it works offline. A broken download goes on where it was.

    Size is in parameters, and GFLOP the arithmetic for an image: twice as much indexes half as fast. Flickr and COCO
    are what others published: how often a caption finds its own image first, among 1,000 images of Flickr30k and 5,000
    of COCO, without training on either.

    For example:

    - `lapclip models`
    - `lapclip models vit-b-32-laion2b`
    - `lapclip models --json`
    - `lapclip search photos/ "a dog on a beach" --model vit-b-32-laion2b`

    Parameters
    ----------
    names
        Fetch these, if they are not here yet. Example: lapclip models vit-b-32-laion2b vit-b-32-openai
    yes
        Do not ask. Example: lapclip models vit-b-32-laion2b --yes
    """
    from lapclip.weights.published_models import MODELS, RECALL_SOURCE
    from lapclip.which_model import fetch_once, published_for_here

    for name in names:
        if name not in MODELS:
            raise ConfigError(
                f"There is no published model {name}. {nearest(name, MODELS)}",
                hint="lapclip models",
            )
    for name in names:
        with display() as bar:
            fetch_once(MODELS[name], yes=yes, counting=bar.counting)
    best = published_for_here()
    shown = [MODELS[name] for name in dict.fromkeys(names)]
    lines: list[str | Table] = []
    chosen = best
    if shown:
        chosen = shown[0]
        lines.append(_table(shown))
    else:
        shown = sorted(MODELS.values(), key=lambda one: one.parameters)
        lines += [_table(shown), f"[dim]Flickr, COCO: {RECALL_SOURCE}[/dim]"]
        if best:
            lines.append(f"[dim]The best that this computer has room for: {best.name}.[/dim]")
    if chosen:
        example = command("search", "PHOTOS", "a dog on a beach", "--model", chosen.name)
        lines.append(f"Next: {escape(typed(example))}")
    emit(
        {"models": [one.to_dict() for one in shown], "best_here": best.name if best else None},
        lines,
        common,
    )
    return 0


def have_model(name: str | None, *, yes: bool) -> None:
    """`lapclip.which_model.have_model`, with a bar."""
    if name is None:
        return
    from lapclip import which_model

    with display() as shown:
        which_model.have_model(name, yes=yes, counting=shown.counting)


def _table(shown: list[PublishedModel]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("model", no_wrap=True, min_width=max(len(one.name) for one in shown))
    for title in ("size", "fetch", "GFLOP", "Flickr", "COCO"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("license", no_wrap=True)
    table.add_column("here", no_wrap=True)
    for one in shown:
        recalls = [
            percent(recall[0]) if recall else UNKNOWN for recall in (one.flickr30k, one.coco)
        ]
        here = "yes" if one.is_cached else "no"
        numbers = (
            parameters(one.parameters),
            size(one.bytes),
            f"{one.image_gigaflops:.0f}",
            *recalls,
        )
        table.add_row(one.name, *numbers, one.license, here)
    return table
