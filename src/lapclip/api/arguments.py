"""What callers give to the functions of `lapclip`, as the commands take it: data, settings, models, texts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lapclip.api.training_run import TrainingRun
from lapclip.config import checked, locate
from lapclip.data.in_memory import TABLE, write_data
from lapclip.data.sources import absolute
from lapclip.embedder import Embedder, Encoder, load_torch
from lapclip.errors import ConfigError
from lapclip.paths import open_own
from lapclip.progress import DataProgress
from lapclip.runs.folder import GIVEN, given_name

if TYPE_CHECKING:
    from lapclip.data.any_image import OneImage

    Data: TypeAlias = (
        str
        | os.PathLike[str]
        | Sequence[tuple[OneImage, str | Sequence[str]]]
        | Mapping[str, Any]
        | Any  # frames and data sets of other libraries, none of which is needed here
        | None
    )
    """Images with captions, in any form that `lapclip.train` takes."""
    Model: TypeAlias = str | os.PathLike[str] | TrainingRun | Encoder
    """A run's name or folder, a folder or file with a model, a published model's name, a `TrainingRun`, or a model that
    `lapclip.load` gave."""
    Settings: TypeAlias = Mapping[str, Any]
    """Settings by their names, as `--set` takes them: `{"train.batch_size": 64}` (docs/settings.md)."""

EXAMPLE = 'settings={"train.batch_size": 64}'


def asked_settings(
    data: Data, settings: Settings | None, progress: DataProgress | None = None
) -> dict[str, Any]:
    """Return the given settings by their whole names, with the data. Data in memory is written to a file."""
    asked = _checked_settings(settings)
    if data is None:
        return asked
    if isinstance(data, (str, os.PathLike)):
        return {**asked, "data.source": absolute(os.fspath(data))}
    return write_data(data, GIVEN, asked, progress)


@contextmanager
def held(asked: Mapping[str, Any]) -> Iterator[None]:
    """Keep a file of data that was written down open: `lapclip clean` leaves what a process works with."""
    source = str(asked.get("data.source", ""))
    with ExitStack() as stack:
        if given_name(source):
            with suppress(OSError):  # where it is gone, whoever reads it says so
                stack.enter_context(open_own(Path(source, TABLE)))
        yield


def as_texts(settings: Mapping[str, Any]) -> list[str]:
    """Settings as --set takes them."""
    return [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]


def _checked_settings(settings: Settings | None) -> dict[str, Any]:
    """Return settings as `section.field`, each checked before anything is done."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"Settings are a dictionary, not a {type(settings).__name__}.", hint=EXAMPLE
        )
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if not isinstance(name, str):
            raise ConfigError(f"A setting is named by a text, not by {name!r:.60}.", hint=EXAMPLE)
        section, field = locate(name)
        found[f"{section}.{field}"] = checked("settings", section, field, _plain(value))
    return found


def _plain(value: Any) -> Any:
    """A path, or a number of numpy or torch, as a plain value."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return str.__str__(value)
    try:
        return value.item()
    except (
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
    ):  # it is none, or has several numbers
        return value


def joined(what: str, texts: str | Sequence[str]) -> str:
    """Return several texts as one setting, with a vertical bar between them. One text stays one."""
    each = [texts] if isinstance(texts, str) else list(texts)
    for text in each:
        if "|" in text:
            raise ConfigError(f"{what}: {text!r} holds a vertical bar.", hint="texts without one")
    return "|".join(each)


def model_name(model: Model | None) -> str | None:
    """The path or name by which a command finds a model. A model that was loaded has to be what lies there still."""
    if not isinstance(model, Encoder):
        return as_path(model)
    save = "lapclip.parts.save_model(MODEL, FOLDER), and that folder"
    if not model.source:
        raise ConfigError("This model was made here, and its weights lie in no file.", hint=save)
    if (
        isinstance(model, Embedder)
        and load_torch(model.source).fingerprint() != model.fingerprint()
    ):
        raise ConfigError(
            f"The model is not what {model.source} holds: one of them has changed.", hint=save
        )
    return model.source


def as_path(value: str | os.PathLike[str] | None) -> str | None:
    """Return a path or a name as text. None if none was given."""
    return None if value is None else os.fspath(value)
