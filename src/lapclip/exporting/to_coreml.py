"""`--to coreml` and `--to coreml-int8`: both towers as Core ML packages, for Apple's devices.

They are converted and looked into on any machine. Running them needs a Mac, so elsewhere they are not checked, and the
README and lapclip.json say so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip.exporting.export_format import ExportFormat, Job, Written, register

if TYPE_CHECKING:
    from lapclip.embedder import Encoder

EXAMPLES = "examples.json"
"""Captions and their tokens, to try a tokenizer of one's own with."""
USE = """\
```
swift example.swift image.jpg
```

`image.mlpackage` takes `picture`, one RGB image; `text.mlpackage` takes `tokens`, int32, one caption padded to the \
longest there can be. Both give `embeddings`, one row of length one. For many at once use Core ML's batch predictions. \
`lapclip.json` says how an image is cut; `tokenizer.json` is for the package swift-transformers."""


class CoreML(ExportFormat):
    """Both towers in float16."""

    purpose = "for Apple's devices"
    engine = "Core ML"
    packages = ("coremltools",)
    extra = "coreml"
    small = False

    def write(self, job: Job) -> Written:
        from lapclip.exporting import coreml_packages as packages
        from lapclip.exporting.tokenizer_files import write_tokenizers

        embedder, folder = job.embedder, job.folder
        notes = write_tokenizers(folder, embedder.tokenizer)
        packages.write_packages(embedder, folder, job.status, small=self.small)
        job.status("verifying the packages")
        structure = packages.verify(folder, embedder, small=self.small)
        notes += packages.structure_notes(structure)
        if not packages.can_predict():
            notes.append(packages.NOT_CHECKED)
        captions = [options[0] for options in job.pairs.held_out.captions[:5]]
        rows = [{"caption": text, "symbols": embedder.tokenizer.encode(text, embedder.context)} for text in captions]
        (folder / EXAMPLES).write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8", newline="\n")
        towers = packages.interface(embedder)
        weights = [folder / tower["file"] for tower in towers.values()]
        return Written(weights, towers, notes, {"structure": structure})

    def open(self, job: Job) -> Encoder | None:
        from lapclip.exporting.coreml_packages import CoreMLEmbedder, can_predict

        return CoreMLEmbedder(job.folder, job.embedder) if can_predict() else None

    def finish(self, job: Job, written: Written, check: dict[str, Any], result: dict[str, Any]) -> None:
        from lapclip.exporting.coreml_packages import NOT_CHECKED, can_predict
        from lapclip.exporting.description import describe, write_description
        from lapclip.exporting.readme import copy_example, write_readme

        about = describe(job.embedder, self.name, written.towers)
        write_description(job.folder, {**about, "check": check if can_predict() else NOT_CHECKED})
        copy_example("example.swift", job.folder)
        write_readme(job.folder, job.embedder.model.shape.name, USE, result)

    def next_step(self, folder: Path) -> str:
        return ""


class CoreMLInt8(CoreML):
    """Both towers with weights of a byte each."""

    purpose = "for Apple's devices at half the size"
    small = True


register(CoreML("coreml"))
register(CoreMLInt8("coreml-int8"))
