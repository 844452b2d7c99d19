"""Models written as other programs want them.

Formats that `lapclip export --to` knows have one file `to_*.py` each, which registers itself here. No torch: a file of
a format imports what it needs to write inside its methods, so that the command's help, which names all formats, is
quick.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip.errors import ConfigError, WeightsError
from lapclip.progress import Status
from lapclip.suggest import command, install

if TYPE_CHECKING:
    from lapclip.data.dataset import Pairs
    from lapclip.embedder import Embedder, Encoder

OUTPUT = "embeddings"
"""What towers that were written for another engine call their output."""
_registered: dict[str, ExportFormat] = {}


@dataclass(frozen=True)
class CheckPairs:
    """The pairs of a check: held-out ones that it is made on, and training ones that a format may choose with."""

    held_out: Pairs
    training: Pairs
    checked_on: str
    """What the held-out pairs are."""
    notes: tuple[str, ...] = ()
    split: str = ""
    """What the held-out pairs are held out as."""


@dataclass(frozen=True)
class Job:
    """One export: the model, the folder to fill, the pairs, and who is told what is being done."""

    embedder: Embedder
    folder: Path
    pairs: CheckPairs
    status: Status = lambda _: None
    name: str = ""
    """What to call the model; empty where its shape has to do."""

    @property
    def title(self) -> str:
        """The model as the README calls it."""
        return self.name or self.embedder.model.shape.name


@dataclass
class Written:
    """What a format wrote."""

    weights: list[Path]
    """Files, or folders, that hold the weights."""
    towers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How each tower's file is called, what its numbers are, and why; empty where the format itself says so."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the check tells beside what it tells of every format."""


class ExportFormat(ABC):
    """How a model is written for another program, and how what was written is opened for the check."""

    purpose: str
    """What it is for, as the help says it after the name."""
    engine: str
    """What runs it in the check."""
    packages: tuple[str, ...] = ()
    extra: str = ""
    """The extra of lapclip that installs these packages."""

    def __init__(self, name: str) -> None:
        """`name` is what `--to` takes."""
        self.name = name

    def check_packages(self) -> None:
        """Refuse, in one line that says what to install, where a package is missing."""
        require_packages(self.packages, self.extra)

    def check_model(self, embedder: Embedder, path: Path) -> None:  # noqa: B027 (most formats take every model)
        """Refuse a model that the format has no place for."""

    @abstractmethod
    def write(self, job: Job) -> Written:
        """Fill the folder."""

    @abstractmethod
    def open(self, job: Job) -> Encoder | None:
        """What was written, ready to run; None where it cannot run on this machine."""

    def finish(  # noqa: B027
        self, job: Job, written: Written, check: dict[str, Any], result: dict[str, Any]
    ) -> None:
        """Write what depends on the check and on the whole result, such as a README with both."""

    def next_step(self, folder: Path) -> str:
        """A command that uses the folder; empty where there is none."""
        return command("eval", folder, "DATA")


def register(format: ExportFormat) -> None:
    """Make a format known under its name."""
    _registered[format.name] = format


@cache
def known_formats() -> dict[str, ExportFormat]:
    """All formats by their names."""
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("to_"):
            importlib.import_module(f"{__name__}.{module.name}")
    return _registered


def find_format(name: str) -> ExportFormat:
    """The format of that name."""
    formats = known_formats()
    if name not in formats:
        raise ConfigError(f"There is no export format {name}.", hint=f"--to {', '.join(formats)}")
    return formats[name]


def require_packages(packages: tuple[str, ...], extra: str) -> None:
    """Refuse, in one line that says what to install, where a package is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise WeightsError(f"This needs {' and '.join(missing)}.", hint=install(extra))
