"""The ways to compute a served model: torch in several precisions, and its exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lapclip import __version__
from lapclip.embedder import Embedder, load_torch, open_exported
from lapclip.exporting.check import FoundExport, find_export
from lapclip.machine.device import DTYPES
from lapclip.paths import digest_of_json
from lapclip.serving.engine import Engine
from lapclip.text import counted
from lapclip.training.precision import RoundedCopy
from lapclip.weights import CONFIG, DESCRIPTION
from lapclip.which_model import WhichModel

INT8 = "onnx-int8"
# Formats of `lapclip export` by the engine that runs them.
EXPORTS = {"onnx-float32": "onnx", INT8: "onnx-int8"}
CPU = "cpu"


@dataclass(frozen=True)
class Form:
    """One way to compute a model."""

    engine: str
    """torch-float32, torch-bfloat16, torch-float16, onnx-float32 or onnx-int8."""
    device: str = CPU
    threads: int = 1
    folder: Path | None = None
    """Folder of the export. None for torch."""

    def __str__(self) -> str:
        if self.device == CPU:
            return f"{self.engine}, {counted(self.threads, 'thread')}"
        return f"{self.engine} on {self.device}, {counted(self.threads, 'thread')}"


class ModelForms:
    """A model with its exports."""

    def __init__(self, which: WhichModel) -> None:
        self.which = which
        self._loaded: dict[str, tuple[Embedder, str]] = {}
        _, self.fingerprint = self.load(CPU)
        self.exports: dict[str, FoundExport] = {}
        """Exports of this very model by engine."""
        run = which.made_by
        for engine, export_format in EXPORTS.items():
            export = find_export(run, export_format) if run else None
            if export and export.is_of(self.fingerprint):
                self.exports[engine] = export

    def load(self, device: str) -> tuple[Embedder, str]:
        """Return the model in torch on a device, and its fingerprint. Loads it once."""
        if device not in self._loaded:
            model = load_torch(self.which.path, device)
            self._loaded[device] = model, model.fingerprint()
        return self._loaded[device]

    def open(self, form: Form) -> Engine:
        """Open an engine. Half precision has the model's fingerprint, because its vectors agree."""
        if form.folder is not None:
            return open_export(form)
        model, fingerprint = self.load(form.device)
        dtype = form.engine.removeprefix("torch-")
        if dtype != "float32":
            rounded = RoundedCopy(model.model, DTYPES[dtype]).model.eval()
            model = Embedder(rounded, model.tokenizer, model.device)
        return Engine(form.engine, model, form.threads, form.device, fingerprint=fingerprint)


def open_export(form: Form) -> Engine:
    """Open an engine that runs an export."""
    assert form.folder is not None
    return Engine(form.engine, open_exported(form.folder, form.threads), form.threads)


@dataclass(frozen=True)
class Stamps:
    """The files of a model at one moment. A change may make another engine the right one."""

    model: str
    """Stamp of the model itself. Empty if it is not on this disk."""
    exports: str

    @classmethod
    def of(cls, which: WhichModel) -> Stamps:
        run = which.made_by
        exports = []
        if run:
            exports = [run.path / "exported" / name / DESCRIPTION for name in EXPORTS.values()]
        return cls(stamp_model(which), stamp_files(exports))


def stamp_model(which: WhichModel) -> str:
    """Return a stamp that changes if a file of a model is replaced. Empty if it is not on disk."""
    path = which.path
    if not path.exists():
        return ""
    if path.is_file():
        return stamp_files([path, *path.parent.glob("*.json")])
    folder = path / "model" if (path / "model" / CONFIG).exists() else path
    return stamp_files([*folder.glob("[!.]*")])


def stamp_files(files: Sequence[Path]) -> str:
    """Return a stamp that changes if one of the files is replaced."""
    stamps = []
    for path in sorted(files):
        try:
            status = path.stat()
        except OSError:
            continue
        stamps.append(
            [str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        )
    return digest_of_json([__version__, *stamps])
