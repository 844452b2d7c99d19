"""`lapclip data check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.output import Common, emit, typed
from lapclip.config import DataConfig
from lapclip.evaluation import note_on_held_out
from lapclip.suggest import command
from lapclip.text import duration, size

Settings = Annotated[tuple[str, ...], Parameter(name="--set", negative="", show_default=False)]
COLOURS = {"alarm": "red", "warning": "yellow", "note": "cyan"}
REFUSED = ("unreadable", "truncated", "skipped_rows")
"""Findings that keep training from starting where they are alarms."""
UNRELATED = ("captions_moved", "captions_unrelated")
"""Findings after which training would learn nothing."""

data = App(
    sort_key=7,
    name="data",
    help="Check images and captions before training on them.\n\nExample: `lapclip data check photos/`",
    help_format="markdown",
)


@data.command
def check(
    source: str,
    /,
    *,
    recipe: str | None = None,
    settings: Settings = (),
    page: Path | None = None,
    common: Common | None = None,
) -> int:
    """Read every image and caption once, and report what is odd, what it costs, and whether training can work.

    For example:

    - `lapclip data check photos/`
    - `lapclip data check captions.csv --set data.caption_column=title`
    - `lapclip data check photos/ --page pairs.html`
    - `lapclip data check scenes --json`

    Parameters
    ----------
    source
        A folder, a CSV, TSV or JSON file, a pattern of tar shards, or `scenes`.
    recipe
        The recipe to estimate with; it sets the image size and the longest caption. Without it: the one that `lapclip
        train` would take. Example: --recipe seed
    settings
        Change a setting; may be repeated. Example: --set model.context=32
    page
        Write a page with 24 random pairs and with examples of each finding. Example: --page pairs.html
    """
    with loading():
        from lapclip.commands.data import check_data

    with display() as shown:
        counted = shown.counting("checking images")
        found = check_data(
            source, recipe, settings, counted, shown.doing, shown.data_progress, page
        )
    emit(found, summary(found, recipe, settings), common)
    return 0


def summary(
    found: dict[str, Any], recipe: str | None = None, settings: Sequence[str] = ()
) -> list[str]:
    """What was found, for people, and how to train on it with what they gave."""
    lines = [
        f"[bold]{escape(found['source'])}[/bold]  {found['images']:,} images, {found['captions']:,} captions"
    ]
    if found["usable"]["images"] < found["images"]:
        lines[0] += f", of which {found['usable']['images']:,} images can be used"
    lines += [f"  {name:<11}{escape(text)}" for name, text in rows(found)]
    lines += [
        "",
        "[bold]findings[/bold]" if found["findings"] else "[green]nothing odd was found[/green]",
    ]
    for finding in found["findings"]:
        colour = COLOURS[finding["severity"]]
        lines.append(f"  [{colour}]{finding['count']:>7,}[/{colour}]  {escape(finding['title'])}")
        lines.append(f"{'':11}[dim]{escape(finding['advice'])}[/dim]")
        lines += [
            f"{'':11}[dim]{escape(_short(example))}[/dim]" for example in finding["examples"][:3]
        ]
    if found["page"]:
        lines += ["", f"page: {escape(found['page'])}"]
    lines += ["", escape(found["outlook"]), f"[dim]checked in {found['seconds']:.1f} s[/dim]"]
    refused = any(
        finding["severity"] == "alarm"
        for finding in found["findings"]
        if finding["kind"] in REFUSED
    )
    anyway = ", or mend or remove what is broken first" if refused else ""
    if refused:
        settings = [*settings, f"data.broken_share={found['broken_share_needed']:g}"]
    words = [
        *[found["source"]] * (found["source"] != DataConfig().source),
        *["--recipe", recipe or ""] * bool(recipe),
    ]
    train = command("train", *words, *_set_words(settings))
    if any(finding["kind"] in UNRELATED for finding in found["findings"]):
        return [*lines, "Next: mend the table, then check it again"]
    return [*lines, f"Next: {escape(typed(train))}{anyway}"]


def _set_words(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts, one a line."""
    ordered = sorted(found["splits"], key="train val test".find)
    counts = {split: found["splits"][split]["images"] for split in ordered}
    how_drawn = f"; drawn by {found['split_rule']}" if found["split_rule"] else ""
    needs, tokens, sizes = found["needs"], found["caption_symbols"], found["picture_pixels"]
    cut = f"{tokens['cut']:,} would be cut" if tokens["cut"] else "none is cut"
    lengths = f"{tokens['median']:.0f} tokens in the middle, {tokens['longest']} at most; room for {tokens['limit']}"
    store = f"{size(needs['store_bytes'])} packed at {needs['image_size']} pixels"
    short = (
        f"short sides from {sizes['shortest']} to {sizes['longest_short_side']} pixels; "
        if sizes
        else ""
    )
    features = needs["features_seconds"]
    once = (
        f", once its towers have read all images, in about {duration(features)}" if features else ""
    )
    listed = [
        ("form", found["how"]),
        (
            "splits",
            ", ".join(f"{split} {images:,}" for split, images in counts.items()) + how_drawn,
        ),
        *(("held out", note) for note in note_on_held_out(counts)),
        ("images", f"{short}{size(needs['source_bytes'])}, {store}"),
        ("captions", f"{lengths}, {cut}"),
        ("tokenizer", found["tokenizer"]["reason"]),
        (
            "scripts",
            ", ".join(f"{script} {count:,}" for script, count in found["scripts"].items())
            or "none known",
        ),
        (
            "an epoch",
            f"about {duration(needs['epoch_seconds'])} with recipe {found['recipe']}{once}: "
            f"{needs['epoch_seconds_from']}",
        ),
    ]
    for split, best in found["ceilings"].items():
        if min(best["t2i_r1"], best["i2t_r1"]) < 1:
            scores = f"text-to-image R@1 {best['t2i_r1']:.4f}, image-to-text {best['i2t_r1']:.4f}"
            listed.append(
                ("ceiling", f"{scores} on {split}: the best that copies and equal captions allow")
            )
    return listed


def _short(text: str, most: int = 100) -> str:
    shown = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."
