from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import lapclip
from lapclip.data.dataset import Pairs
from lapclip.data.scenes import ALPHABET
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.embedder import Embedder
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
    together = embedder.encode_text(["a cat", "three purple butterflies in the centre, on a quiet night."] * 50)
    assert together.shape == (100, 64)
    np.testing.assert_allclose(together[0], alone[0], atol=1e-5)


def test_pairs_are_embedded_with_progress_and_equal_captions_are_equal_to_the_last_bit(embedder: Embedder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 64, 64, 3), dtype=np.uint8)
    captions = [["a cat", f"thing {at}, seen from afar" * (at % 3)] for at in range(70)]
    told: list[tuple[int, int]] = []
    images, texts, owner = embedder.encode_pairs(
        Pairs(pixels, captions), lambda done, total: told.append((done, total))
    )
    assert owner.tolist() == [at // 2 for at in range(140)]
    assert (texts[::2] == texts[0]).all()
    np.testing.assert_allclose(texts, embedder.encode_text([text for pair in captions for text in pair]), atol=1e-5)
    np.testing.assert_array_equal(images, embedder.encode_pixels(pixels))
    distinct = len({text for pair in captions for text in pair})
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (70 + distinct, 70 + distinct)


def test_nothing_in_nothing_out(embedder: Embedder) -> None:
    assert embedder.encode_image([]).shape == (0, 64)
    assert embedder.encode_text([]).shape == (0, 64)


def test_one_string_is_a_mistake_that_is_named(embedder: Embedder) -> None:
    with pytest.raises(TypeError, match="takes a list of captions"):
        embedder.encode_text("a cat")
    with pytest.raises(TypeError, match="takes a list of images"):
        embedder.encode_image("cat.png")


def test_a_saved_model_loads_and_gives_the_same_rows(embedder: Embedder, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(embedder.description()))
    save_file(embedder.model.state_dict(), folder / "model.safetensors")
    for path in (folder, folder.parent):
        np.testing.assert_array_equal(lapclip.load(path).encode_text(["a cat"]), embedder.encode_text(["a cat"]))
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(lapclip.LapclipError, match="cannot be loaded"):
        lapclip.load(folder)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(lapclip.LapclipError, match="no trained model"):
        lapclip.load(tmp_path)
    with pytest.raises(lapclip.LapclipError, match="There is no folder"):
        lapclip.load(tmp_path / "nowhere")
