"""The README of an exported folder: how to use it, and what the check found."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lapclip.exporting.export_folder import MARK, README

EXAMPLES = Path(__file__).with_name("examples")


def write_onnx_readme(folder: Path, name: str, result: dict[str, Any]) -> None:
    """With an example in Python that needs nothing of lapclip."""
    shutil.copyfile(EXAMPLES / "example.py", folder / "example.py")
    use = (
        "```\npip install onnxruntime numpy pillow tokenizers\n"
        'python example.py picture.jpg "a dog" "a red car"\n```\n\n'
        "`image.onnx` takes `pixels`, uint8 (batch, side, side, 3); `text.onnx` takes `tokens`, int64 (batch, length). "
        "Both give `embeddings`, float32 rows of length one. `lapclip.json` says how an image is cut and a caption "
        "written as tokens; `tokenizer.json` holds the tokens. `example.py` does both. In Python with lapclip: "
        '`lapclip.exporting.engine.open_export("FOLDER").encode_image(["picture.jpg"])`.'
    )
    _write(folder, name, use, result)


def write_coreml_readme(folder: Path, name: str, result: dict[str, Any]) -> None:
    """With an example in Swift."""
    shutil.copyfile(EXAMPLES / "example.swift", folder / "example.swift")
    use = (
        "```\nswift example.swift picture.jpg\n```\n\n"
        "`image.mlpackage` takes `picture`, one RGB image; `text.mlpackage` takes `tokens`, int32, one caption "
        "padded to the longest there can be. Both give `embeddings`, one row of length one. For many at once use Core "
        "ML's batch predictions. `lapclip.json` says how an image is cut; "
        "`tokenizer.json` is for the package swift-transformers."
    )
    _write(folder, name, use, result)


def _write(folder: Path, name: str, use: str, result: dict[str, Any]) -> None:
    notes = "".join(f"- {note}\n" for note in result["notes"])
    table = "\n".join(["```", *table_lines(result), "```"])
    text = f"# {name}, {result['format']}\n\n{MARK}\n\n{use}\n\n## Check\n\n{table}\n\n{notes}"
    (folder / README).write_text(text, encoding="utf-8", newline="\n")


def table_lines(result: dict[str, Any]) -> list[str]:
    """The check as a table: what was lost, what was gained."""
    lines = [f"on {result['checked_on']}"]
    low, high = result["intervals"]["recall_before"]
    lines.append(f"{'':<30}{'before':>10}{'after':>10}")
    after = result["recall_after"]
    there = f"{after:>10.1%}" if after is not None else f"{'-':>10}"
    said = ""
    if after is not None:
        said = "   95 % interval after {:.1%} to {:.1%}".format(*result["intervals"]["recall_after"])
    lines.append(
        f"{'text-to-image R@1':<30}{result['recall_before']:>10.1%}{there}   before {low:.1%} to {high:.1%}{said}"
    )
    before, now = result["weights_bytes_before"], result["weights_bytes"]
    lines.append(f"{'size, MB':<30}{before / 1e6:>10.2f}{now / 1e6:>10.2f}   {before / now:.2f}x smaller")
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
