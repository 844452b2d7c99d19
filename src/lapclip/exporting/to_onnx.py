"""`--to onnx` and `--to onnx-int8`: both towers as ONNX files, which ONNX Runtime runs without torch."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip.exporting.export_format import ExportFormat, Job, Written, register

if TYPE_CHECKING:
    from lapclip.embedder import Encoder
    from lapclip.exporting.check import Embedded

USE = """\
```
pip install onnxruntime numpy pillow tokenizers
python example.py image.jpg "a dog" "a red car"
```

`image.onnx` takes `pixels`, uint8 (batch, side, side, 3); `text.onnx` takes `tokens`, int64 (batch, length). Both \
give `embeddings`, float32 rows of length one. `lapclip.json` says how an image is cut and a caption written as \
tokens; `tokenizer.json` holds the tokens. `example.py` does both. In Python with lapclip: \
`lapclip.load("FOLDER").encode_image(["image.jpg"])`."""


class Onnx(ExportFormat):
    """Both towers in float32."""

    purpose = "for ONNX Runtime"
    engine = "ONNX Runtime"
    packages = ("onnx", "onnxscript", "onnxruntime")
    extra = "export"

    def write(self, job: Job) -> Written:
        from lapclip.exporting.onnx_towers import interface
        from lapclip.exporting.tokenizer_files import write_tokenizers

        notes = write_tokenizers(job.folder, job.embedder.tokenizer)
        numbers = self._write_towers(job)
        towers = {tower: {**about, **numbers[tower]} for tower, about in interface(job.embedder).items()}
        written = Written([job.folder / tower["file"] for tower in towers.values()], towers, notes)
        self._describe(job, written)
        return written

    def _write_towers(self, job: Job) -> dict[str, dict[str, Any]]:
        """Write both files, and say of each what its numbers are."""
        from lapclip.exporting.onnx_towers import FLOAT, write_float

        return {tower: {"numbers": FLOAT} for tower in write_float(job.embedder, job.folder, job.status)}

    def _describe(self, job: Job, written: Written, **check: Any) -> None:
        from lapclip.exporting.description import describe, write_description

        write_description(job.folder, {**describe(job.embedder, self.name, written.towers), **check})

    def open(self, job: Job) -> Encoder:
        from lapclip.embedder import open_exported

        return open_exported(job.folder)

    def finish(self, job: Job, written: Written, check: dict[str, Any], result: dict[str, Any]) -> None:
        from lapclip.exporting.readme import copy_example, write_readme

        self._describe(job, written, check=check)
        copy_example("example.py", job.folder)
        write_readme(job.folder, job.embedder.model.shape.name, USE, result)

    def next_step(self, folder: Path) -> str:
        return f"python {shlex.quote(str(folder / 'example.py'))} IMAGE CAPTION ..."


class OnnxInt8(Onnx):
    """Both towers in the int8 form that measuring prefers; a tower that loses too much in each stays in float32."""

    purpose = "for a quarter of the size and less time"

    def _write_towers(self, job: Job) -> dict[str, dict[str, Any]]:
        from lapclip.exporting.onnx_towers import write_int8

        return write_int8(job.embedder, job.folder, job.pairs.training, job.status)

    def mend(self, job: Job, written: Written, before: Embedded, after: Embedded) -> bool:
        """Put back in float32 the towers that fail the check by themselves."""
        from lapclip.exporting.check import LEAST_COSINE, MOST_LOST, Embedded, compare, recall_lost
        from lapclip.exporting.onnx_towers import FLOAT, TRIED

        alone = {
            "image": Embedded(after.images, before.texts, before.owner),
            "text": Embedded(before.images, after.texts, before.owner),
        }
        changed = False
        for tower, found in alone.items():
            described = written.towers[tower]
            check, (lost, by_chance) = compare(before, found), recall_lost(before, found)
            close = check["cosine"][tower]["mean"] >= LEAST_COSINE and lost <= MOST_LOST + by_chance
            if close or described["numbers"] == FLOAT:
                continue
            shutil.copyfile(job.folder / TRIED / f"{tower}.onnx", job.folder / f"{tower}.onnx")
            described["why"] = (
                f"the {tower} tower stays in float32: in {described['numbers']} it has cosine "
                f"{check['cosine'][tower]['mean']:.4f} and R@1 {check['recall_after']:.1%} after "
                f"{check['recall_before']:.1%} on held-out pairs"
            )
            described["numbers"] = FLOAT
            changed = True
        shutil.rmtree(job.folder / TRIED, ignore_errors=True)
        if changed:
            self._describe(job, written)
        return changed


register(Onnx("onnx"))
register(OnnxInt8("onnx-int8"))
