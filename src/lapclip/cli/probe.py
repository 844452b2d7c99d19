"""`lapclip probe`."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.output import Common, emit, typed
from lapclip.text import duration, parameters, percent, printable, size


def probe(
    data: str,
    /,
    *,
    towers: Annotated[str | None, Parameter(show_default=False)] = None,
    texts: Annotated[str | None, Parameter(show_default=False)] = None,
    images: Annotated[int | None, Parameter(show_default=False)] = None,
    device: str = "auto",
    settings: Annotated[
        tuple[str, ...], Parameter(name="--set", negative="", show_default=False)
    ] = (),
    common: Common | None = None,
) -> int:
    """Say which pretrained towers suit your images and captions, in a minute and without training.

    Each network reads some of the training images, or their captions, once. Linear maps between the features of two
    networks are fitted without training (canonical correlation analysis) and scored on pairs
    that they were not fitted to. What training heads on all images would reach is predicted from that.

    For example:

    - `lapclip probe photos/`
    - `lapclip probe photos/ --texts minilm-l6,hf:sentence-transformers/all-mpnet-base-v2`
    - `lapclip probe captions.csv --towers timm:vit_small_patch14_dinov2.lvd142m --json`

    Parameters
    ----------
    data
        Images with captions, as `lapclip train` reads them.
    towers
        Image networks, with commas between them, by the names that `model.image_from` takes. Without it: those that are
        installed as packages. Example: lapclip probe photos/ --towers efficientnet-lite0,efficientnet-lite2
    texts
        Text networks, by the names that `model.text_from` takes. Without it: those that are installed as packages.
        Example: lapclip probe photos/ --texts minilm-l6,hf:sentence-transformers/all-mpnet-base-v2
    images
        How many images are read; more take longer and say more. Example: lapclip probe photos/ --images 300
    device
        Where to compute: auto, cpu, cuda, mps, xpu. Example: lapclip probe photos/ --device cpu
    settings
        A setting that heads would be trained with; may be repeated. Example: lapclip probe a.csv --set
        data.caption_column=title
    """
    with loading():
        from lapclip.commands.probe import IMAGES, Callbacks, ProbeRequest
        from lapclip.commands.probe import probe as probe_data

    request = ProbeRequest(
        data, _names(towers), _names(texts), IMAGES if images is None else images, device, settings
    )
    with display() as shown:
        result = probe_data(request, Callbacks(shown.doing, shown.data_progress))
    emit(result, _lines(result), common)
    return 0


def _names(listed: str | None) -> list[str]:
    return [name.strip() for name in (listed or "").split(",") if name.strip()]


def _lines(result: dict[str, Any]) -> list[str]:
    counts = f"{result['images']:,} images, {result['captions']:,} captions"
    lines = [f"[bold]{escape(printable(result['source']))}[/bold]  {counts}"]
    pairs = result["pairs"]
    width = max(len(_pair_name(pair)) for pair in pairs)
    found, expected = (
        f"R@1 of {result['candidates']:,}",
        f"trained, of {pairs[0]['predicted']['candidates']:,}",
    )
    head = f"{'text to image':<{width}}   {found:<24}{expected:<24}{'parameters':>10}{'reads all in':>16}{'memory':>10}"
    lines.append(f"[bold]{head}[/bold]")
    learning = f"heads on {result['training_images']:,} images"
    lines.append(
        f"[dim]R@1 of {result['candidates']:,}: how often a caption finds its own among so many; "
        f"trained: what {learning} should reach[/dim]"
    )
    for pair in pairs:
        shares = f"{_share(pair):<24}{_share(pair['predicted']):<24}"
        rest = f"{parameters(pair['parameters']):>10}{duration(pair['features_seconds']):>16}{size(pair['memory']):>10}"
        lines.append(f"{escape(_pair_name(pair)):<{width}}   {shares}{rest}")
    lines.append(f"[dim]{'chance':<{width}}   {percent(result['chance'])}[/dim]")
    lines += [f"[dim]{escape(printable(note))}[/dim]" for note in result["notes"]]
    best = result["recommended"]
    lines += [
        "",
        f"Recommended: {escape(best['image'])} and {escape(best['text'])}; {escape(best['why'])}.",
    ]
    return [
        *lines,
        f"[dim]in {duration(result['seconds'])}[/dim]",
        f"Next: {escape(typed(best['command']))}",
    ]


def _pair_name(pair: dict[str, Any]) -> str:
    return printable(f"{pair['image']} and {pair['text']}")


def _share(found: dict[str, Any]) -> str:
    return f"{percent(found['t2i_r1'])} ({percent(found['t2i_r1_low'])} to {percent(found['t2i_r1_high'])})"
