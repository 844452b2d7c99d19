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
from lapclip.text import size

Settings = Annotated[tuple[str, ...], Parameter(name="--set", negative="", show_default=False)]
COLORS = {"alarm": "red", "warning": "yellow", "note": "cyan"}
REFUSED = ("unreadable", "truncated", "skipped_rows")  # as alarms they keep training from starting
UNRELATED = "captions_unrelated"  # training would learn nothing
MAX_EXAMPLE_LENGTH = 100  # characters

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
    """Describe what was found, and how to train on it with the same recipe and settings."""
    title = f"[bold]{escape(found['source'])}[/bold]"
    counts = f"{found['images']:,} images, {found['captions']:,} captions"
    usable = found["usable"]["images"]
    if usable < found["images"]:
        counts += f", of which {usable:,} images can be used"
    lines = [f"{title}  {counts}"]
    lines += [f"  {name:<11}{escape(text)}" for name, text in rows(found)]
    lines.append("")
    lines.append(
        "[bold]findings[/bold]" if found["findings"] else "[green]nothing odd was found[/green]"
    )
    for finding in found["findings"]:
        color = COLORS[finding["severity"]]
        lines.append(f"  [{color}]{finding['count']:>7,}[/{color}]  {escape(finding['title'])}")
        for text in (finding["advice"], *map(_short, finding["examples"][:3])):
            lines.append(f"{'':11}[dim]{escape(text)}[/dim]")
    if found["page"]:
        lines += ["", f"page: {escape(found['page'])}"]
    lines += ["", escape(found["outlook"]), f"[dim]checked in {found['seconds']:.1f} s[/dim]"]
    lines.append(f"Next: {escape(next_step(found, recipe, settings))}")
    return lines


def next_step(found: dict[str, Any], recipe: str | None, settings: Sequence[str]) -> str:
    """Return the command that trains on the data, or what to do first."""
    if any(finding["kind"] == UNRELATED for finding in found["findings"]):
        return "mend the table, then check it again"
    if not found["splits"].get("train"):
        return "mend the data or add images to train on, then check it again"
    words = ["train"]
    if found["source"] != DataConfig().source:
        words.append(found["source"])
    if recipe:
        words += ["--recipe", recipe]
    alarms = {finding["kind"] for finding in found["findings"] if finding["severity"] == "alarm"}
    is_refused = not alarms.isdisjoint(REFUSED)
    if is_refused:
        settings = [*settings, f"data.broken_share={found['broken_share_needed']:g}"]
    for setting in settings:
        words += ["--set", setting]
    train = typed(command(*words))
    return f"{train}, or mend or remove what is broken first" if is_refused else train


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts, one a line, each with its name."""
    needs, tokens, sizes = found["needs"], found["caption_symbols"], found["picture_pixels"]
    counts = {
        split: found["splits"][split]["images"]
        for split in sorted(found["splits"], key="train val test".find)
    }
    splits = ", ".join(f"{split} {images:,}" for split, images in counts.items())
    if found["split_rule"]:
        splits += f"; drawn by {found['split_rule']}"
    images = f"{size(needs['source_bytes'])}, {size(needs['store_bytes'])} packed at {needs['image_size']} pixels"
    if sizes:
        sides = f"short sides from {sizes['shortest']} to {sizes['longest_short_side']} pixels"
        images = f"{sides}; {images}"
    cut = f"{tokens['cut']:,} would be cut" if tokens["cut"] else "none is cut"
    lengths = f"{tokens['median']:.0f} tokens in the middle, {tokens['longest']} at most"

    listed = [("form", found["how"]), ("splits", splits)]
    listed += [("held out", note) for note in note_on_held_out(counts)]
    listed += [
        ("images", images),
        ("captions", f"{lengths}; room for {tokens['limit']}, {cut}"),
        ("tokenizer", found["tokenizer"]["reason"]),
        ("recipe", f"{found['recipe']}, for which images and captions are measured"),
    ]
    for split, best in found["ceilings"].items():
        if min(best["t2i_r1"], best["i2t_r1"]) < 1:
            scores = f"text-to-image R@1 {best['t2i_r1']:.4f}, image-to-text {best['i2t_r1']:.4f}"
            listed.append(
                ("ceiling", f"{scores} on {split}: the best that copies and equal captions allow")
            )
    return listed


def _short(text: str) -> str:
    """Return a text on one line, cut to what a terminal shows."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(printable.split())
    if len(line) <= MAX_EXAMPLE_LENGTH:
        return line
    return f"{line[: MAX_EXAMPLE_LENGTH - 3]}..."
