from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import lapclip
from lapclip.data.dataset import Pairs
from lapclip.data.pixels import mean_and_std
from lapclip.data.scenes import ALPHABET
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.embedder import Embedder, naming_device_flag
from lapclip.errors import ConfigError
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES


@pytest.fixture
def embedder() -> Embedder:
    return Embedder(CLIP(SHAPES["tiny"]).eval(), CharacterTokenizer(ALPHABET), Cpu())


def test_paths_and_images_give_the_same_unit_rows(embedder: Embedder, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    image.save(tmp_path / "picture.png")
    rows = embedder.encode_image([image, tmp_path / "picture.png", str(tmp_path / "picture.png")])
    assert rows.shape == (3, 64)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-6)


def test_a_caption_has_the_same_embedding_in_any_company(embedder: Embedder) -> None:
    alone = embedder.encode_text(["a cat"])
    together = embedder.encode_text(
        ["a cat", "three purple butterflies in the centre, on a quiet night."] * 50
    )
    assert together.shape == (100, 64)
    np.testing.assert_allclose(together[0], alone[0], atol=1e-5)


def test_pairs_are_embedded_with_progress_and_equal_captions_are_equal_to_the_last_bit(
    embedder: Embedder,
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 64, 64, 3), dtype=np.uint8)
    captions = [["a cat", f"thing {at}, seen from afar" * (at % 3)] for at in range(70)]
    told: list[tuple[int, int]] = []
    images, texts, owner = embedder.encode_pairs(
        Pairs(pixels, captions), lambda done, total: told.append((done, total))
    )
    assert owner.tolist() == [at // 2 for at in range(140)]
    assert (texts[::2] == texts[0]).all()
    np.testing.assert_allclose(
        texts, embedder.encode_text([text for pair in captions for text in pair]), atol=1e-5
    )
    np.testing.assert_array_equal(images, embedder.encode_pixels(pixels))
    distinct = len({text for pair in captions for text in pair})
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (70 + distinct, 70 + distinct)


def test_nothing_in_nothing_out(embedder: Embedder) -> None:
    assert embedder.encode_image([]).shape == (0, 64)
    assert embedder.encode_text([]).shape == (0, 64)


def test_a_single_item_gives_a_single_vector(embedder: Embedder, tmp_path: Path) -> None:
    image = Image.new("RGB", (50, 40), "orange")
    image.save(tmp_path / "a.png")
    rows = embedder.encode_image([image])
    for one in (
        image,
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        (tmp_path / "a.png").read_bytes(),
    ):
        np.testing.assert_array_equal(embedder.encode_image(one), rows[0])
    np.testing.assert_array_equal(embedder.encode_text("a cat"), embedder.encode_text(["a cat"])[0])


def test_arrays_and_tensors_are_seen_as_the_image_they_are(embedder: Embedder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 40, 60, 3), dtype=np.uint8)
    rows = embedder.encode_image([Image.fromarray(each) for each in pixels])
    first = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    for many in (
        pixels,
        list(pixels),
        pixels / 255,
        first,
        list(first),
        first / 255,
        (first / 255).double(),
    ):
        np.testing.assert_allclose(embedder.encode_image(many, batch_size=2), rows, atol=1e-6)
    for one in (
        pixels[0],
        first[0],
        pixels[0].transpose(2, 0, 1),
    ):  # the last: an array that was a tensor
        np.testing.assert_allclose(embedder.encode_image(one), rows[0], atol=1e-6)
    grey = embedder.encode_image(Image.fromarray(pixels[0, :, :, 0]))
    for one in (pixels[0, :, :, 0], pixels[0, :, :, :1], first[0, :1]):
        np.testing.assert_array_equal(embedder.encode_image(one), grey)


def test_what_is_no_image_is_refused_in_words(embedder: Embedder) -> None:
    normalised = torch.randn(3, 20, 20)
    for value, why in [
        (normalised, "from 0 to 1"),
        (np.full((20, 20, 3), 300), "from 0 to 255"),
        (np.zeros((20, 20, 7), np.uint8), "no image"),
        (np.zeros(20, np.uint8), "no image"),
        (np.zeros((1, 2, 20, 20, 3), np.uint8), "neither"),
        ([None], "no image"),
        (17, "no image"),
        (b"not a file", "10 bytes cannot be read as an image: it is not an image"),
    ]:
        with pytest.raises(lapclip.LapclipError, match=why):
            embedder.encode_image(value)  # pyright: ignore[reportArgumentType]
    for size in (0, 2.5, "8"):
        with pytest.raises(lapclip.LapclipError, match="batch_size"):
            embedder.encode_text(["a"], batch_size=size)  # pyright: ignore[reportArgumentType]


def test_what_is_no_text_is_refused_in_words(embedder: Embedder) -> None:
    for captions, why in [
        (17, "a int"),
        (None, "a NoneType"),
        (b"a cat", "a bytes"),
        (["a", None], "item 1 is None"),
    ]:
        with pytest.raises(lapclip.LapclipError, match=why):
            embedder.encode_text(captions)  # pyright: ignore[reportArgumentType]
    image = Image.new("RGB", (40, 40))
    for labels, templates in [
        (None, ["{}"]),
        (17, ["{}"]),
        (["a"], None),
        (["a"], [17]),
        ([], ["{}"]),
    ]:
        with pytest.raises(lapclip.LapclipError, match="classify"):
            embedder.classify(image, labels, templates=templates)  # pyright: ignore[reportArgumentType, reportCallIssue]
    drawn: Any = (label for label in "ab")
    assert set(embedder.classify(image, drawn)) == {"a", "b"}
    with pytest.raises(lapclip.LapclipError, match="NoneType is no path"):
        lapclip.load(None)  # pyright: ignore[reportArgumentType]


def test_bytes_are_read_as_their_file_is(embedder: Embedder, tmp_path: Path) -> None:
    Image.linear_gradient("L").resize((7000, 5000)).save(
        tmp_path / "large.jpg"
    )  # which is decoded at half its size
    content = (tmp_path / "large.jpg").read_bytes()
    row = embedder.encode_image(tmp_path / "large.jpg")
    for form in (bytes, bytearray, memoryview):
        np.testing.assert_array_equal(embedder.encode_image(form(content)), row)
    with Image.new("1", (14000, 13000)) as huge:
        huge.save(tmp_path / "huge.png")
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    for hostile, why in [
        ((tmp_path / "huge.png").read_bytes(), "million|megapixels"),
        (postscript, "known form"),
    ]:
        with pytest.raises(lapclip.LapclipError, match=why):  # PostScript would start a program
            embedder.encode_image(hostile)


def test_what_is_kept_of_a_model_does_not_depend_on_the_default_precision(
    embedder: Embedder,
) -> None:
    image = Image.linear_gradient("L")
    row = embedder.encode_image(image)
    mean_and_std.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        embedder.encode_image(image)
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(embedder.encode_image(image), row)


def test_progress_is_a_callback_or_a_bar(
    embedder: Embedder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, told = [Image.new("RGB", (9, 9))] * 5, []
    embedder.encode_image(
        images, batch_size=2, progress=lambda done, total: told.append((done, total))
    )
    assert told == [(2, 5), (4, 5), (5, 5)]
    embedder.encode_text(["a"] * 5, progress=True)
    assert capsys.readouterr().err == ""  # nobody looks
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    embedder.encode_text(["a"] * 5, progress=True)
    assert "embedding captions" in capsys.readouterr().err


def test_classify_orders_the_labels_and_follows_the_model(embedder: Embedder) -> None:
    image = Image.new("RGB", (50, 40), "orange")
    shares = embedder.classify(image, ["cat", "dog", "red_owl"])
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    plain = embedder.classify([image], ["cat", "dog"], templates=["{}"])
    similarity = embedder.encode_text(["cat", "dog"]) @ embedder.encode_image(image)
    scale = embedder.logits().scale
    wanted = np.exp(scale * similarity) / np.exp(scale * similarity).sum()
    assert [plain[0][name] for name in ("cat", "dog")] == pytest.approx(wanted.tolist(), rel=1e-4)
    with pytest.raises(lapclip.LapclipError, match="list of labels"):
        embedder.classify(image, "cat")
    with pytest.raises(lapclip.LapclipError, match="'cat' is there twice"):
        embedder.classify(image, ["cat", "dog", "cat"])
    for templates in ("a {}", ["a photo"], []):
        with pytest.raises(lapclip.LapclipError, match="list of templates"):
            embedder.classify(image, ["cat", "dog"], templates=templates)


def test_a_model_moves_to_a_device_or_says_that_it_is_not_here(embedder: Embedder) -> None:
    before = embedder.encode_text("a cat")
    np.testing.assert_array_equal(embedder.to("cpu").encode_text("a cat"), before)
    with pytest.raises(lapclip.LapclipError, match="not here"):
        embedder.to("abacus")


def test_only_errors_about_the_device_name_its_flag() -> None:
    for message, hint, shown in (
        ("train.device cuda is not here", "--set", "--device auto"),
        ("minilm-l6 is not installed", "pip install", "pip install"),
    ):
        with pytest.raises(ConfigError) as error, naming_device_flag():
            raise ConfigError(message, hint=hint)
        assert error.value.message == message.replace("train.device", "--device")
        assert error.value.hint == shown


def test_a_model_shows_what_it_is(trained: Path) -> None:
    model = lapclip.load(trained)
    for part in (str(trained), "32 x 32", "cpu"):
        assert part in repr(model)


def test_a_saved_model_loads_and_gives_the_same_rows(embedder: Embedder, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(embedder.description()))
    save_file(embedder.model.state_dict(), folder / "model.safetensors")
    for path in (folder, folder.parent):
        np.testing.assert_array_equal(
            lapclip.load(path).encode_text(["a cat"]), embedder.encode_text(["a cat"])
        )
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(lapclip.LapclipError, match="cannot be loaded"):
        lapclip.load(folder)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(lapclip.LapclipError, match="no trained model"):
        lapclip.load(tmp_path)
    with pytest.raises(lapclip.LapclipError, match="There is no folder"):
        lapclip.load(tmp_path / "nowhere")
