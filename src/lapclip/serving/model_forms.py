"""The ways to compute a served model: torch in several precisions, and its exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lapclip import __version__
from lapclip.embedder import Embedder, Encoder, load_torch, open_exported
from lapclip.exporting.check import FoundExport, find_export
from lapclip.machine.device import DTYPES
from lapclip.paths import CacheFile, digest_of_json
from lapclip.serving.engine import Engine
from lapclip.text import counted
from lapclip.training.precision import RoundedCopy
from lapclip.weights import CONFIG, DESCRIPTION
from lapclip.which_model import WhichModel

# Formats of `lapclip export` by the engine that runs them.
EXPORTS = {"onnx-float32": "onnx", "onnx-int8": "onnx-int8"}
CPU = "cpu"
FINGERPRINTS = CacheFile("model_fingerprints.json")


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


@dataclass
class ModelForms:
    """A model with its exports. Computes its fingerprint unless that is remembered of its files."""

    which: WhichModel
    exports: dict[str, FoundExport] = field(default_factory=dict)
    """Exports of this very model by engine."""
    stale_formats: list[str] = field(default_factory=list)
    """Formats of exports that were made from another model."""
    _loaded: dict[str, Embedder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        key = str(self.which.path.absolute())
        self._stamp = stamp_model(self.which)
        remembered = FINGERPRINTS.read(key)
        if self._stamp and isinstance(remembered, dict) and remembered.get("files") == self._stamp:
            self.fingerprint = str(remembered["fingerprint"])
        else:
            self.fingerprint = self.load(CPU).fingerprint()
            if self._is_unchanged:
                FINGERPRINTS.write(key, {"files": self._stamp, "fingerprint": self.fingerprint})
        run = self.which.made_by
        for engine, export_format in EXPORTS.items():
            export = find_export(run, export_format) if run else None
            if export and export.is_of(self.fingerprint):
                self.exports[engine] = export
            elif export:
                self.stale_formats.append(export_format)

    @property
    def _is_unchanged(self) -> bool:
        """Whether no file of the model was replaced since its fingerprint was found."""
        return bool(self._stamp) and stamp_model(self.which) == self._stamp

    def load(self, device: str) -> Embedder:
        """Return the model in torch on a device, loaded once."""
        if device not in self._loaded:
            self._loaded[device] = load_torch(self.which.path, device)
        return self._loaded[device]

    def open(self, form: Form) -> Engine:
        """Open an engine. Half precision has the model's fingerprint, because its vectors agree."""
        if form.folder is not None:
            return open_export(form)
        model: Encoder = self.load(form.device)
        # The fingerprint does not belong to weights that were saved after it was found.
        fingerprint = self.fingerprint if self._is_unchanged else model.fingerprint()
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
