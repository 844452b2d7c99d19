"""The README of an exported folder: how to use it, and what the check found."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lapclip.exporting.export_folder import MARK, README

EXAMPLES = Path(__file__).with_name("examples")


def copy_example(name: str, folder: Path) -> None:
    """A program that uses the folder and needs nothing of lapclip."""
    shutil.copyfile(EXAMPLES / name, folder / name)


def write_readme(folder: Path, model: str, use: str, result: dict[str, Any]) -> None:
    """The name of the model, how its folder is used, and what the check found."""
    notes = "".join(f"- {note}\n" for note in result["notes"])
    table = "\n".join(["```", *table_lines(result), "```"])
    text = f"# {model}, {result['format']}\n\n{MARK}\n\n{use}\n\n## Check\n\n{table}\n\n{notes}"
    (folder / README).write_text(text, encoding="utf-8", newline="\n")


def table_lines(result: dict[str, Any]) -> list[str]:
    """The check as a table: what was lost, what was gained."""
    lines = [f"on {result['checked_on']}"]
    low, high = result["intervals"]["recall_before"]
    lines.append(f"{'':<30}{'before':>10}{'after':>10}")
    after = result["recall_after"]
    now = f"{after:>10.1%}" if after is not None else f"{'-':>10}"
    interval = ""
    if after is not None:
        interval = "   95 % interval after {:.1%} to {:.1%}".format(*result["intervals"]["recall_after"])
    lines.append(
        f"{'text-to-image R@1':<30}{result['recall_before']:>10.1%}{now}   before {low:.1%} to {high:.1%}{interval}"
    )
    before, small = result["weights_bytes_before"], result["weights_bytes"]
    lines.append(f"{'size, MB':<30}{before / 1e6:>10.2f}{small / 1e6:>10.2f}   {before / small:.2f}x smaller")
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
        lines.append(f"{f'cosine, {tower} tower':<30}{'mean':>10}{close['mean']:>10.5f}   worst {close['worst']:.5f}")
    return lines
