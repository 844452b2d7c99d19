"""`lapclip probe`: towers compared in closed form, and the command that trains heads on the best of them."""

from __future__ import annotations

import json

import pytest

from lapclip.cli.app import main
from lapclip.commands.probe import ProbeRequest, probe
from lapclip.errors import ConfigError, DataError
from lapclip.weights import pretrained_networks
from tests.networks import tiny_text

IMAGE = "tiny-image"
FEW = ("data.train_pairs=64", "model.image_size=32")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_text(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def found(text: str) -> dict:
    return probe(ProbeRequest("scenes", [IMAGE], [text], images=60, settings=FEW))


def test_each_pair_of_towers_has_its_recall_with_an_interval(found: dict, text: str) -> None:
    (pair,) = found["pairs"]
    assert (pair["image"], pair["text"]) == (IMAGE, text)
    for way in ("t2i", "i2t"):
        assert 0 <= pair[f"{way}_r1_low"] <= pair[f"{way}_r1"] <= pair[f"{way}_r1_high"] <= 1
    assert pair["seconds"] > 0
    assert pair["memory"] >= 4 * pair["parameters"]
    assert found["images"] == 60
    assert found["candidates"] == 12  # a fifth of them


def test_the_recommended_command_names_the_towers_and_how_data_is_read(
    found: dict, text: str
) -> None:
    words = found["recommended"]["command"].split()
    assert words[:5] == ["lapclip", "train", "scenes", "--recipe", "heads"]
    assert {
        f"model.image_from={IMAGE}",
        f"model.text_from={text}",
        "model.image_taps=",
        FEW[0],
    } <= set(words)


def test_the_command_prints_it_for_scripts_and_for_people(
    text: str, capsys: pytest.CaptureFixture
) -> None:
    words = ["probe", "scenes", "--towers", IMAGE, "--texts", text, "--images", "40"]
    words += [word for setting in FEW for word in ("--set", setting)]
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert IMAGE in out
    assert json.loads(out)["pairs"][0]["text"] == text


def test_too_few_images_say_how_many_it_takes(text: str) -> None:
    for images in (10, -3):
        with pytest.raises(ConfigError, match=f"--images {images}: 40"):
            probe(ProbeRequest("scenes", [IMAGE], [text], images=images, settings=FEW))
    with pytest.raises(DataError, match="40"):
        probe(ProbeRequest("scenes", [IMAGE], [text], settings=["data.train_pairs=30"]))


def test_without_towers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained_networks, "PACKAGED", {})
    with pytest.raises(ConfigError) as refused:
        probe(ProbeRequest("scenes", settings=FEW))
    assert "small-towers" in (refused.value.hint or "")
