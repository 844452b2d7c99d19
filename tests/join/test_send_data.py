"""Copied data is the data, to the bit; and a guest opens nothing that a host names."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lapclip.commands.join import read_offer, versions
from lapclip.config import Config, build_config, parse_settings
from lapclip.data.dataset import DataSet, Pairs
from lapclip.data.loading import load_data
from lapclip.data.pixels import View
from lapclip.errors import ConfigError, JoinError, LostRank, NoAnswer, RunError
from lapclip.join import send_data
from lapclip.join.agreement import AGREEMENT, MACHINES, Agreement
from lapclip.join.send_data import (
    FileDigest,
    bundle_folder,
    copy_bundle,
    digest_of_bundle,
    files_of,
    load_again,
    read_bundle,
)
from lapclip.model.shapes import SHAPES
from lapclip.progress import ignore_progress
from lapclip.training.distributed import Ranks
from lapclip.training.ranks_in_a_run import check_place
from lapclip.training.teacher import open_teacher

from ..conftest import SMALL
from ..small_runs import photos, write_classes


def config_of(source: Path, *settings: str) -> Config:
    values = [*SMALL, f"data.source={source}", "train.batch_size=8", *settings]
    return build_config([parse_settings(values)], SHAPES)


def copy(data: DataSet) -> str:
    files = files_of(data)
    digests = [file.digest() for file in files]
    copy_bundle(digests, lambda number, *ends: files[number].read(*ends), ignore_progress)
    return digest_of_bundle(digests)


@pytest.mark.parametrize("make", [photos, write_classes])
def test_copied_data_is_the_data(
    here: Path, empty_cache: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_data, "CHUNK_BYTES", 1000)
    config = config_of(make(here / "data", 24))
    data = load_data(config.data, View.of(config.model))
    copied = read_bundle(copy(data))
    for name in ("fingerprint", "alphabet", "notes", "classes", "how_split"):
        assert getattr(copied, name) == getattr(data, name)
    assert list(copied.splits) == list(data.splits)
    for split, pairs in data.splits.items():
        theirs = copied.splits[split]
        assert np.array_equal(theirs.pixels[:], pairs.pixels[:])
        assert list(map(list, theirs.captions)) == list(map(list, pairs.captions))
        assert list(theirs.names) == list(pairs.names)
        for field in fields(Pairs):
            own, other = getattr(pairs, field.name), getattr(theirs, field.name)
            if isinstance(own, np.ndarray) and field.name != "pixels":
                assert own.dtype == other.dtype
                assert np.array_equal(own, other)


def test_an_interrupted_copy_continues(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_data, "CHUNK_BYTES", 1000)
    content = np.random.default_rng(0).integers(0, 256, 4500, np.uint8)
    file = send_data.SentFile(content)
    digests = [file.digest()]
    requested = []

    def read(number: int, first: int, last: int) -> bytes:
        requested.append(first)
        if len(requested) == 3:
            raise NoAnswer("cut off")
        return file.read(first, last)

    with pytest.raises(NoAnswer):
        copy_bundle(digests, read, ignore_progress)
    folder = bundle_folder(digest_of_bundle(digests))
    assert not folder.exists()
    copy_bundle(digests, read, ignore_progress)
    assert requested == [0, 1000, 2000, 2000, 3000, 4000]
    assert next(folder.iterdir()).read_bytes() == content.tobytes()


def test_changed_data_never_appears(empty_cache: Path) -> None:
    digests: list[FileDigest] = [send_data.SentFile(np.zeros(100, np.uint8)).digest()]
    with pytest.raises(JoinError, match="digest"):
        copy_bundle(digests, lambda number, first, last: b"1" * (last - first), ignore_progress)
    assert not bundle_folder(digest_of_bundle(digests)).exists()


def test_a_full_disk_is_named_before_the_copy(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_data, "room_left", lambda folder: 1_000)
    with pytest.raises(JoinError, match="disk"):
        copy_bundle([(5000, "0" * 64)], lambda *_: pytest.fail("it was read"), ignore_progress)


def test_a_guest_opens_no_path_of_its_host(
    here: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(photos(here / "data", 24), "train.teacher=other")
    data = load_data(config.data, View.of(config.model))
    bundle = copy(data)
    monkeypatch.setenv(AGREEMENT, Agreement.on(config, data.fingerprint, "").to_json())
    with pytest.raises(RunError, match="opens no path"):
        load_again(config, data.fingerprint, None)
    with pytest.raises(ConfigError, match="opens no teacher"):
        open_teacher(config)
    monkeypatch.setenv(AGREEMENT, Agreement.on(config, data.fingerprint, bundle).to_json())
    monkeypatch.setattr(send_data, "load_data", lambda *_: pytest.fail("a path was opened"))
    assert load_again(config, data.fingerprint, None).fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("train", "start", "/etc/model"),
        ("train", "teacher", "other"),
        ("model", "image_from", "evil:make"),
        ("model", "text_from", "hf:a/b"),
    ],
)
def test_another_run_than_agreed_is_refused(
    section: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build_config([parse_settings(SMALL)], SHAPES)
    monkeypatch.setenv(AGREEMENT, Agreement.on(plain, "12345678", "").to_json())
    other = replace(plain, **{section: replace(getattr(plain, section), **{name: value})})
    with pytest.raises(RunError, match=f"its {name} is"):
        load_again(other, "12345678", None)
    with pytest.raises(RunError, match="its fingerprint is"):
        load_again(plain, "87654321", None)


def ranks(*, writes: bool) -> Ranks:
    made = Ranks()
    made.writer = 0 if writes else 1
    return made


@pytest.mark.parametrize("is_guest", [False, True])
def test_only_the_host_writes(is_guest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check_place(ranks(writes=is_guest))  # torchrun alone
    monkeypatch.setenv(MACHINES, "2")
    if is_guest:
        plain = build_config([parse_settings(SMALL)], SHAPES)
        monkeypatch.setenv(AGREEMENT, Agreement.on(plain, "12345678", "").to_json())
    check_place(ranks(writes=not is_guest))
    with pytest.raises(LostRank):
        check_place(ranks(writes=is_guest))


def offer(**changes: Any) -> dict[str, Any]:
    """Return what a host offers, with changes."""
    message = {
        "versions": versions(),
        "name": "desktop",
        "run_id": "0123456789abcdef",
        "machines": 2,
        "settings": asdict(build_config([parse_settings(SMALL)], SHAPES)),
        "fingerprint": "scenes",
        "pairs": 64,
        "files": [],
    }
    return message | changes


def settings_with(section: str, **values: Any) -> dict[str, Any]:
    settings = offer()["settings"]
    return settings | {section: settings[section] | values}


PATHS = settings_with("data", source="/etc")


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [[10, "0" * 64]]},  # drawn images need no files
        {"settings": PATHS},  # a path is not drawn
        {"settings": PATHS, "files": [[10]]},
        {"settings": PATHS, "files": ["../x"]},
        {"settings": PATHS, "files": {"0": 1}},
        {"settings": []},
        {"settings": {}},
        {"run_id": "a b/../c"},
        {"machines": 1},
        {"machines": "2"},
        {"versions": None},
        {"versions": {}},
    ],
)
def test_a_hostile_offer_is_refused(changes: dict[str, Any]) -> None:
    assert read_offer(offer()).config.model.name == "tiny"
    with pytest.raises(JoinError, match="not valid"):
        read_offer(offer(**changes))


@pytest.mark.parametrize(
    ("name", "theirs"), [("lapclip", "0.0.1"), ("torch", "0.0.1"), ("system", "Darwin")]
)
def test_computers_that_cannot_train_together_are_refused(
    name: str, theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    with pytest.raises(JoinError, match=f"The host has {name} {theirs}, this computer has "):
        read_offer(offer(versions=versions() | {name: theirs}))
