"""Data that was brought over is the data, to the bit; and a guest opens nothing that a host names."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lapclip.commands.join import read_manifest
from lapclip.config import Config, build_config, parse_settings
from lapclip.data.dataset import DataSet, Pairs
from lapclip.data.loading import load_data
from lapclip.data.pixels import View
from lapclip.data.tokenizers import choose_tokenizer
from lapclip.errors import DataError, JoinError, LostRank, RunError
from lapclip.model.shapes import SHAPES
from lapclip.together import AGREED, STATUS, Agreement, tell_agent
from lapclip.together.bundle import (
    bring_over,
    bundle_folder,
    digests_of,
    load_again,
    parts_of,
    read_bundle,
)
from lapclip.training.array_cache import array_path
from lapclip.training.run_parts import make_plan

from ..conftest import SMALL
from ..small_runs import photos, write_classes

HOST, OTHER_HOST = "0" * 16, "1" * 16


def config_of(source: Path, *settings: str) -> Config:
    return build_config(
        [parse_settings([*SMALL, f"data.source={source}", "train.batch_size=8", *settings])], SHAPES
    )


def bring(data: DataSet, config: Config) -> None:
    parts = parts_of(data)
    folder = bundle_folder(HOST, data.fingerprint, View.of(config.model))
    bring_over(folder, digests_of(parts), lambda at, first, last: [parts[at].read(first, last)])


def assert_same(ours: Pairs, theirs: Pairs) -> None:
    for field in fields(Pairs):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "pixels":
            one, other = one[:], other[:]
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
        elif field.name == "captions":
            assert [list(captions) for captions in one] == [list(captions) for captions in other]
        else:
            assert list(one) == list(other) if field.name == "names" else one == other


@pytest.mark.parametrize(
    "make", [lambda path: photos(path, 24), lambda path: write_classes(path, 12)]
)
def test_batches_of_what_was_brought_over_are_those_of_the_data(
    here: Path, empty_cache: Path, make: Any
) -> None:
    config = config_of(make(here / "data"))
    data = load_data(config.data, View.of(config.model))
    bring(data, config)
    brought = read_bundle(HOST, data.fingerprint, View.of(config.model))
    assert brought is not None
    for name in ("fingerprint", "alphabet", "notes", "classes", "how_split"):
        assert getattr(brought, name) == getattr(data, name)
    assert list(brought.splits) == list(data.splits)
    for split, pairs in data.splits.items():
        assert_same(brought.splits[split], pairs)
    captions = [caption for options in data.train.captions for caption in options]
    tokenizer = choose_tokenizer(config.data, captions, data.alphabet, config.model.context)[0]
    plans = [make_plan(config, one, tokenizer) for one in (data, brought)]
    for step in range(1, 6):
        one, other = (plan.batch(step) for plan in plans)
        for field in fields(one):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


def test_a_model_that_sees_otherwise_does_not_take_it(here: Path, empty_cache: Path) -> None:
    config = config_of(photos(here / "data", 24))
    data = load_data(config.data, View.of(config.model))
    bring(data, config)
    assert read_bundle(HOST, data.fingerprint, View(64)) is None
    assert read_bundle(HOST, "0" * 16, View.of(config.model)) is None


def test_a_description_of_other_data_is_refused(here: Path, empty_cache: Path) -> None:
    config = config_of(photos(here / "data", 24))
    data = load_data(config.data, View.of(config.model))
    bring(replace(data, fingerprint="0" * 16), config)
    view = View.of(config.model)
    bundle_folder(HOST, "0" * 16, view).rename(bundle_folder(HOST, data.fingerprint, view))
    with pytest.raises(DataError, match="other data"):
        read_bundle(HOST, data.fingerprint, view)


def test_a_guest_opens_no_path_that_the_host_names(
    here: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(photos(here / "data", 24))
    data = load_data(config.data, View.of(config.model))
    agreed = Agreement.on(config, HOST, data.fingerprint)
    monkeypatch.setenv(AGREED, agreed.variables()[AGREED])
    with pytest.raises(RunError, match="no longer in the cache"):
        load_again(config, data.fingerprint, None)
    bring(data, config)
    assert load_again(config, data.fingerprint, None).fingerprint == data.fingerprint


def test_what_one_host_gave_is_not_taken_for_the_users_own_nor_for_another_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, paths = config_of(Path("photos")), [array_path("image", "data")]
    for host in (HOST, OTHER_HOST):
        monkeypatch.setenv(AGREED, Agreement.on(config, host, "12345678").variables()[AGREED])
        paths.append(array_path("image", "data"))
        assert paths[-1].match("features-*.npy")  # what `lapclip clean` looks for
    assert len(set(paths)) == 3
    view = View.of(config.model)
    assert bundle_folder(HOST, "12345678", view) != bundle_folder(OTHER_HOST, "12345678", view)


def test_a_guest_reads_a_copy_where_its_user_says(
    here: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = photos(here / "copy", 24)
    config = config_of(here / "not here")
    fingerprint = load_data(config_of(own).data, View.of(config.model)).fingerprint
    monkeypatch.setenv(
        AGREED, Agreement.on(config, HOST, fingerprint, str(own)).variables()[AGREED]
    )
    assert load_again(config, fingerprint, None).fingerprint == fingerprint


@pytest.mark.parametrize(
    "setting",
    [
        "train.start=/etc/model",
        "train.teacher=other",
        "model.image_from=evil:make",
        "model.text_from=hf:a/b",
    ],
)
def test_a_run_other_than_agreed_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build_config([parse_settings(SMALL)], SHAPES)
    monkeypatch.setenv(AGREED, Agreement.on(plain, HOST, "12345678").variables()[AGREED])
    section, _, rest = setting.partition(".")
    name, _, value = rest.partition("=")
    other = replace(plain, **{section: replace(getattr(plain, section), **{name: value})})
    with pytest.raises(RunError, match=f"its {name} is"):
        load_again(other, "12345678", None)
    with pytest.raises(RunError, match="its fingerprint is"):
        load_again(plain, "87654321", None)


def offered(**changes: Any) -> dict[str, Any]:
    """What a host tells, as `lapclip.commands.join` writes it, with some of it changed."""
    import importlib.metadata
    import platform
    import time

    from lapclip import __version__

    config = build_config([parse_settings(SMALL)], SHAPES)
    told = {
        "lapclip": __version__,
        "torch": importlib.metadata.version("torch").partition("+")[0],
        "system": platform.system(),
        "name": "desktop",
        "run_id": "0123456789abcdef",
        "machines": 2,
        "port": 29401,
        "settings": asdict(config),
        "data": "drawn",
        "fingerprint": "scenes",
        "pairs": 64,
        "files": [],
        "time": time.time(),
    }
    return {**told, **changes}


def test_what_a_host_offers_is_read() -> None:
    assert read_manifest(offered()).config.model.name == "tiny"


def settings_with(section: str, **values: Any) -> dict[str, Any]:
    whole = offered()["settings"]
    return {**whole, section: {**whole[section], **values}}


DIGEST = "0" * 64
FILE = {"size": 10, "chunks": [DIGEST]}
PATHS = settings_with("data", source="/etc")


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "../../../etc", "data": "bundled", "files": [FILE], "settings": PATHS},
        {
            "data": "bundled",
            "fingerprint": "12345678",
            "files": [FILE],
        },  # drawn images need no files
        {"data": "drawn", "settings": PATHS},  # a path is nothing that is drawn
        {"data": "bundled", "fingerprint": "12345678", "files": [], "settings": PATHS},
        {
            "data": "bundled",
            "fingerprint": "12345678",
            "files": [{"size": -1, "chunks": []}],
            "settings": PATHS,
        },
        {
            "data": "bundled",
            "fingerprint": "12345678",
            "files": [{**FILE, "size": 1 << 40}],
            "settings": PATHS,
        },
        {
            "data": "bundled",
            "fingerprint": "12345678",
            "files": [{**FILE, "chunks": ["../x"]}],
            "settings": PATHS,
        },
        {"data": "bundled", "fingerprint": "12345678", "files": [FILE] * 101, "settings": PATHS},
        {"run_id": "a b/../c"},
        {"machines": 1},
        {"port": 99999},
        {"settings": []},
        {"time": "now"},
    ],
)
def test_a_hostile_offer_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(JoinError, match="cannot be read"):
        read_manifest(offered(**changes))


@pytest.mark.parametrize("program", ["lapclip", "torch"])
def test_other_versions_are_refused_with_both_named(program: str) -> None:
    with pytest.raises(JoinError, match=rf"{program} 0\.0\.1.* here it is {offered()[program]}"):
        read_manifest(offered(**{program: "0.0.1"}))


def test_clocks_that_differ_are_refused() -> None:
    with pytest.raises(JoinError, match="clocks"):
        read_manifest(offered(time=offered()["time"] - 100))


def test_macos_and_others_are_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    with pytest.raises(JoinError, match="gloo issue 383"):
        read_manifest(offered(system="Darwin"))
    assert read_manifest(offered(system="Darwin"), anyway=True)


def test_an_agent_starts_again_only_who_lost_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status"
    monkeypatch.setenv(STATUS, str(path))
    tell_agent(2, LostRank("rank 1 is gone"))
    assert not path.exists()
    tell_agent(2, DataError("no images"))
    assert path.read_text() == "2"
