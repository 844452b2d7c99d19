"""Every field of a model's configuration is checked where it is read, and a wrong one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lapclip.cli.app import main
from lapclip.config import ModelConfig
from lapclip.embedder import Embedder, load
from lapclip.errors import LapclipError
from lapclip.weights import PREPROCESSOR, huggingface, openclip
from lapclip.weights.read_model import read_model

from .made import embedder, save_huggingface, save_openclip, save_own

WRONG = (
    -1,
    0,
    "64",
    "",
    None,
    [],
    {},
    [1, "a", 2],
    True,
    1.5,
    float("nan"),
    10**12,
    10**400,
    "os:system",
)
"""Values for each field; some of them are right for some fields."""


def save_published(model: Embedder, folder: Path) -> Path:
    """Write a CLIP for Hugging Face with what it says about images."""
    save_huggingface(model, folder)
    shape = model.model.shape
    described = huggingface.preprocessor_of(shape, shape.image_size)
    (folder / PREPROCESSOR).write_text(json.dumps(described))
    return folder


def leaves(values: dict[str, Any], *above: str) -> list[tuple[str, ...]]:
    """Return the keys that lead to each field, sections included."""
    found = [(*above, name) for name in values]
    for name, value in values.items():
        if isinstance(value, dict) and name not in ("description", "alphabet"):
            found += leaves(value, *above, name)
    return found


FORMS: dict[str, tuple[Callable[[Embedder, Path], Path], str, int]] = {
    "ours": (save_own, "config.json", 34),
    "openclip": (save_openclip, openclip.CONFIG, 12),
    "huggingface": (save_published, "config.json", 14),
    "preprocessor": (save_published, PREPROCESSOR, 6),
}
"""How to write a model, the file with its configuration, and how many of its fields are refused at least."""


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_value_of_any_field_is_one_clear_error(form: str, tmp_path: Path) -> None:
    save, name, least = FORMS[form]
    folder = save(embedder(), tmp_path / "model")
    right = json.loads((folder / name).read_text())
    refused = set()
    for keys in leaves(right):
        for value in WRONG:
            changed = json.loads(json.dumps(right))
            section = changed
            for key in keys[:-1]:
                section = section[key]
            section[keys[-1]] = value
            (folder / name).write_text(json.dumps(changed))
            said = refusal(folder)
            assert len(said.splitlines()) <= 3, (keys, value, said)
            assert "Error" not in said, (keys, value, said)
            if keys[-1] in said:
                refused.add(".".join(keys))
    if form == "ours":
        assert {f"model.{field.name}" for field in fields(ModelConfig)} <= refused
    assert len(refused) >= least, refused


def refusal(folder: Path) -> str:
    try:
        read_model(folder)
    except LapclipError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("crop_share", -1, "model.crop_share must be at least 0.1, not -1"),
        ("patch", 0, "model.patch must be at least 1, not 0"),
        ("image_width", "64", "model.image_width must be a whole number, not '64'"),
        ("image_from", "os:system", "model.image_from is 'os:system'; it must name the network"),
        ("activation", "relu", "model.activation cannot be 'relu'; it is one of gelu"),
        ("hidden", 1, "unknown field model.hidden"),
    ],
)
def test_the_field_the_value_and_what_is_allowed_are_said(
    field: str, value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_own(embedder(), tmp_path / "model")
    saved = json.loads((folder / "config.json").read_text())
    saved["model"][field] = value
    (folder / "config.json").write_text(json.dumps(saved))
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(folder), "scenes"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert str(folder / "config.json") in said
    assert "fault in lapclip" not in said


@pytest.mark.parametrize("missing", ["image_width", "context"])
def test_a_missing_field_is_named(missing: str, tmp_path: Path) -> None:
    folder = save_own(embedder(), tmp_path / "model")
    saved = json.loads((folder / "config.json").read_text())
    del saved["model"][missing]
    (folder / "config.json").write_text(json.dumps(saved))
    with pytest.raises(LapclipError, match=f"model.{missing} is missing"):
        load(folder)
