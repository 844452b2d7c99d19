"""The folder of an export: written whole or not at all, never over something else, with a description and a README.

lapclip.json says what a program has to know to use exported towers; `lapclip.embedder` reads it. The README says how
to use the folder, and what the check found.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip import __version__
from lapclip.errors import WeightsError
from lapclip.paths import is_link, leftovers, partial_path, replace, sweep
from lapclip.text import printable, without_controls
from lapclip.user_files import refusal
from lapclip.weights import DESCRIPTION, EXPORT_VERSION, MERGES, OWN_TOKENIZER, TOKENIZER

if TYPE_CHECKING:
    from lapclip.embedder import Embedder

README = "README.md"
EXPORTED = "exported"
"""The folder in a run's own that exports go to, each under the name of its format."""
MARK = "Written by `lapclip export`."
"""The line of a README that says that a folder is ours to replace."""
EXAMPLES = Path(__file__).with_name("examples")
WRITTEN = {
    *(
        README,
        DESCRIPTION,
        TOKENIZER,
        OWN_TOKENIZER,
        MERGES,
        *(path.name for path in EXAMPLES.iterdir()),
    ),
    *("tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
    *("open_clip_config.json", "open_clip_model.safetensors"),
    *("config.json", "preprocessor_config.json", "model.safetensors"),
    *("image.onnx", "text.onnx", "image.mlpackage", "text.mlpackage", "examples.json"),
    *(".DS_Store", "Thumbs.db", "desktop.ini"),  # by the system itself
}
"""All that formats write into a folder: anything else in it is the user's own."""
MOST_NAMED = 3
"""Files of the user's own that are named."""


def check_free(out: Path, *, force: bool) -> None:
    """Refuse a path that holds something. With `force` an earlier export may be replaced, and nothing else.

    An export that a killed process had moved aside counts: it is moved back first.
    """
    restore_moved(out)
    if out.is_dir() and not any(out.iterdir()):
        return
    if not out.exists() and not out.is_symlink():
        return
    if not _is_export(out):
        raise refusal(out, "--out NEW_FOLDER")
    if not force:
        raise WeightsError(
            f"{out} holds an earlier export.", hint="--force to replace it, or --out NEW_FOLDER"
        )
    if foreign := sorted(path.name for path in out.iterdir() if path.name not in WRITTEN):
        names = ", ".join(map(printable, foreign[:MOST_NAMED])) + ", ..." * (
            len(foreign) > MOST_NAMED
        )
        raise WeightsError(
            f"{out} holds more than an earlier export: {names}.", hint="--out NEW_FOLDER"
        )


def restore_moved(out: Path) -> None:
    """Move an export back that a killed process had moved aside to replace it."""
    out = Path(os.path.realpath(out))
    if out.exists():
        return
    for old in leftovers(out.parent, f".{glob.escape(out.name)}.*"):
        if old.suffix == ".old":
            try:
                replace(old, out)
            except OSError as error:
                what = f"The export that was in {out} is in {old} and cannot be moved back"
                raise WeightsError(f"{what}: {error.strerror}.", hint="move it yourself") from error
            return


@contextmanager
def written_whole(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to fill, which takes its place once all is written."""
    from lapclip.machine.desktop import ends_in_order  # not for a command that only prints its help

    with ends_in_order():
        yield from _written_whole(out, force)


def _written_whole(out: Path, force: bool) -> Iterator[Path]:
    check_free(out, force=force)
    if is_link(out):  # what it leads to is replaced, and the link stays
        out = Path(os.path.realpath(out))
    partial = partial_path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out.parent, f".{glob.escape(out.name)}.*")
        partial.mkdir()
        yield partial
        check_free(out, force=force)  # it may have been filled since
        if out.exists():
            old = partial_path(out, "old")
            replace(out, old)
            try:
                replace(partial, out)
            except OSError:
                replace(old, out)  # what was there stays
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            replace(partial, out)
    except OSError as error:
        raise WeightsError(
            f"Cannot write {out}: {error.strerror or error}.",
            hint="--out FOLDER, where there is room",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_export(out: Path) -> bool:
    try:
        return MARK in (out / README).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False


def describe(embedder: Embedder, to: str, towers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What lapclip.json says, but for the result of the check."""
    model, tokenizer, view = embedder.model, embedder.tokenizer, embedder.view
    shape, bias = model.shape, model.logit_bias
    return {
        "version": EXPORT_VERSION,
        "format": to,
        "written_by": f"lapclip {__version__}",
        "made_from": embedder.fingerprint(),
        "model": shape.name,
        "embedding": shape.embedding,
        "logit_scale": float(model.logit_scale.detach().exp()),
        **({} if bias is None else {"logit_bias": float(bias.detach())}),
        "towers": towers,
        "preprocessing": {
            "side": view.side,
            "resized": view.resized,
            "resize": view.resize,
            "interpolation": view.interpolation,
            "colours": view.colours,
            "mean": [float(number) for number in shape.pixel_mean.split()],
            "deviation": [float(number) for number in shape.pixel_std.split()],
            "scaled_by": "the image tower itself: give it 0 to 255",
        },
        "tokenizer": {
            "file": TOKENIZER,
            "longest": shape.context,
            **({"filled_to": shape.context} if tokenizer.fills else {}),
            "padding": tokenizer.padding,
            "start": tokenizer.start,
            "end": tokenizer.end,
        },
    }


def write_json(path: Path, contents: dict[str, Any], *, ascii: bool = True) -> None:
    """Plain data as people read it too; with `ascii`, letters beyond ASCII are escaped."""
    path.write_text(
        json.dumps(contents, indent=2, ensure_ascii=ascii) + "\n", encoding="utf-8", newline="\n"
    )


def copy_example(name: str, folder: Path) -> None:
    """A program that uses the folder and needs nothing of lapclip."""
    shutil.copyfile(EXAMPLES / name, folder / name)


def write_readme(folder: Path, model: str, use: str, result: dict[str, Any]) -> None:
    """The name of the model, how its folder is used, and what the check found."""
    notes = "".join(f"- {note}\n" for note in result["notes"])
    table = "\n".join(["```", *table_lines(result), "```"])
    text = f"# {model}, {result['format']}\n\n{MARK}\n\n{use}\n\n## Check\n\n{table}\n\n{notes}"
    (folder / README).write_text(without_controls(text), encoding="utf-8", newline="\n")


def table_lines(result: dict[str, Any]) -> list[str]:
    """The check as a table: what was lost, what was gained."""
    lines = [f"on {result['checked_on']}"]
    low, high = result["intervals"]["recall_before"]
    what = f"text-to-image R@1, {result['split']}" if result.get("split") else "text-to-image R@1"
    lines.append(f"{'':<30}{'before':>10}{'after':>10}")
    after = result["recall_after"]
    now = f"{after:>10.1%}" if after is not None else f"{'-':>10}"
    interval = ""
    if after is not None:
        interval = "   95 % interval after {:.1%} to {:.1%}".format(
            *result["intervals"]["recall_after"]
        )
    lines.append(
        f"{what:<30}{result['recall_before']:>10.1%}{now}   before {low:.1%} to {high:.1%}{interval}"
    )
    before, small = result["weights_bytes_before"], result["weights_bytes"]
    ratio = before / small
    change = (
        f"{ratio:.2f}x smaller"
        if ratio >= 1.005
        else f"{1 / ratio:.2f}x larger"
        if ratio <= 0.995
        else "the same"
    )
    lines.append(f"{'size, MB':<30}{before / 1e6:>10.2f}{small / 1e6:>10.2f}   {change}")
    for row in result["latency"]:
        what = f"{row['tower']} tower, {row['batch']} at once"
        lines.append(
            f"{what + ', ms':<30}{row['ms_before']:>10.2f}{row['ms_after']:>10.2f}   {row['ratio']:.2f}x torch"
        )
    if result["latency"]:
        speed = result["ms_before"] / result["ms_after"]
        lines.append(
            f"{'both, one at once, ms':<30}{result['ms_before']:>10.2f}{result['ms_after']:>10.2f}   {speed:.2f}x torch"
        )
    if result.get("busy"):
        lines.append(f"times: {result['busy']}")
    for tower, close in (result["cosine"] or {}).items():
        lines.append(
            f"{f'cosine, {tower} tower':<30}{'mean':>10}{close['mean']:>10.5f}   worst {close['worst']:.5f}"
        )
    return lines
