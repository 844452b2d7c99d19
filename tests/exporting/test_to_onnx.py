"""Towers in ONNX Runtime against the same towers in torch: ours, of convolutions, and foreign ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import lapclip
from lapclip.commands.export import write_and_check
from lapclip.data.dataset import Pairs
from lapclip.data.pixels import middle_square
from lapclip.embedder import Embedder, OnnxEmbedder, OnnxSession, load_torch, open_exported
from lapclip.errors import WeightsError
from lapclip.exporting import CheckPairs, Job, find_format, int8, require_packages
from lapclip.exporting.check import cosines
from lapclip.exporting.export_folder import EXAMPLES, describe, table_lines, write_json
from lapclip.exporting.int8 import FLOAT, Step, Tried, prepare, quantize, steps_for
from lapclip.exporting.to_onnx import interface, write_float, write_graph, write_int8
from lapclip.exporting.tokenizer_files import write_tokenizers
from lapclip.model.shapes import SHAPES
from lapclip.weights import DESCRIPTION

from ..networks import TinyImage, tiny_text
from ..weights.made import CAPTIONS, SHAPE, SIGLIP, characters, embedder, siglip_tokenizer
from ..weights.test_pretrained_networks import both

pytest.importorskip("onnxruntime", reason="needs the extra export")
pytest.importorskip("onnxscript", reason="needs the extra export")

SMALL = replace(SHAPE, crop_share=32 / 36, pixel_mean="0.5 0.4 0.3", colours="srgb")
CONVOLUTIONS = replace(
    SHAPES["photos"], image_size=32, image_width=16, image_layers=4, text_width=16, text_heads=1
)
DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
WORDS = [
    "a red cat",
    "the small dog on the left at night",
    "a house",
    "the blue tree and the yellow cat in the day",
]


def foreign(folder: Path) -> Embedder:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    return both(tiny_text(folder / "bert"), image_taps="2", text_taps="0 2")[1]


KINDS: dict[str, Callable[[Path], Embedder]] = {
    "transformer": lambda _: embedder(SMALL, characters()),
    "convolutions": lambda _: embedder(CONVOLUTIONS, characters()),
    "foreign": foreign,
    "siglip": lambda _: embedder(replace(SIGLIP, image_size=32), siglip_tokenizer()),
}


def quiet(_: str) -> None:
    """Nobody is told."""


ALWAYS = ("transformer", "foreign")
"""Kinds that are tried each time; each takes many seconds."""


@pytest.fixture(
    scope="module",
    params=[
        kind if kind in ALWAYS else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS
    ],
)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Embedder, Path]:
    """A model in torch, and its folder in float32."""
    folder = tmp_path_factory.mktemp(request.param)
    ours = KINDS[request.param](folder)
    ours.model.eval()
    out = folder / "onnx"
    out.mkdir()
    write_tokenizers(out, ours.tokenizer)
    write_float(ours, out, quiet)
    write_json(out / DESCRIPTION, describe(ours, "onnx", interface(ours)))
    return ours, out


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_both_towers_give_what_torch_gives(exported: tuple[Embedder, Path], batch: int) -> None:
    ours, folder = exported
    there = open_exported(folder)
    pixels = IMAGES[:batch]
    np.testing.assert_allclose(there.embed_pixels(pixels), ours.embed_pixels(pixels), atol=1e-5)
    for length in (ours.context,) if ours.tokenizer.fills else (2, 8, ours.context):
        tokens = DRAW.integers(0, min(20, ours.tokenizer.vocabulary - 4), (batch, length))
        tokens[:, -1] = ours.tokenizer.end
        np.testing.assert_allclose(there.embed_tokens(tokens), ours.embed_tokens(tokens), atol=1e-5)


def test_paths_and_captions_are_taken_as_by_the_model_itself(
    exported: tuple[Embedder, Path], tmp_path: Path
) -> None:
    ours, folder = exported
    Image.fromarray(DRAW.integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    there = open_exported(folder)
    np.testing.assert_allclose(there.encode_text(WORDS), ours.encode_text(WORDS), atol=1e-5)
    images = [tmp_path / "a.png", Image.new("L", (40, 33), 90)]
    np.testing.assert_allclose(there.encode_image(images), ours.encode_image(images), atol=1e-5)
    assert there.encode_text([]).shape == (0, ours.embedding)


@pytest.mark.slow  # `test_export_command.py` has a run in int8
def test_int8_is_smaller_and_close(exported: tuple[Embedder, Path], tmp_path: Path) -> None:
    ours, plain = exported
    captions = [(WORDS[at % 4],) for at in range(32)]
    write_tokenizers(tmp_path, ours.tokenizer)
    chosen = write_int8(ours, tmp_path, Pairs(IMAGES, captions), quiet)
    assert all(
        tower["numbers"] == FLOAT or tower["numbers"].startswith("int8")
        for tower in chosen.values()
    )
    described = {tower: {**about, **chosen[tower]} for tower, about in interface(ours).items()}
    write_json(tmp_path / DESCRIPTION, describe(ours, "onnx-int8", described))
    there = open_exported(tmp_path)
    assert cosines(ours.embed_pixels(IMAGES), there.embed_pixels(IMAGES))["mean"] >= 0.995
    assert cosines(ours.encode_text(WORDS), there.encode_text(WORDS))["mean"] >= 0.995
    for tower, about in chosen.items():
        assert about["tried"][0]["step"] in ("static", "dynamic")
        if about["numbers"] != FLOAT:
            small, large = (folder / f"{tower}.onnx" for folder in (tmp_path, plain))
            assert (
                small.stat().st_size < 0.7 * large.stat().st_size
            )  # these are too small for the graph not to count


def steps_tried(ours: Embedder, folder: Path) -> dict[str, tuple[str, dict[str, float]]]:
    """What was taken for each tower, and the cosine of each step that was tried."""
    chosen = write_int8(ours, folder, Pairs(IMAGES, [(WORDS[at % 4],) for at in range(32)]), quiet)
    return {
        tower: (about["numbers"], {one["step"]: one["cosine"] for one in about["tried"]})
        for tower, about in chosen.items()
    }


@pytest.mark.slow
def test_products_stay_in_float32_where_the_others_keep_the_embeddings(tmp_path: Path) -> None:
    ours = foreign(tmp_path)
    blocks: list[Any] = [
        part for part in ours.model.text.modules() if hasattr(part, "intermediate")
    ]
    assert len(blocks) == 3
    with torch.no_grad():
        for block in blocks:
            wide, narrow = block.intermediate.dense, block.output.dense
            wide.weight.mul_(20)
            narrow.weight.mul_(20)
            wide.bias[0] = 200  # one number that dwarfs those beside it, and hardly counts
            narrow.weight[:, 0].mul_(1e-4)
    numbers, found = steps_tried(ours, tmp_path)["text"]
    assert found["dynamic"] < 0.99
    assert numbers == "int8, dynamic without narrowing products"
    assert found["dynamic without narrowing products"] > 0.9955


@pytest.mark.slow
def test_weights_alone_are_rounded_where_nothing_else_keeps_the_embeddings(tmp_path: Path) -> None:
    ours = both(tiny_text(tmp_path / "bert"))[1]
    network: Any = next(part for part in ours.model.image.modules() if isinstance(part, TinyImage))
    with torch.no_grad():
        network.stem.weight[0].mul_(
            1e4
        )  # a channel of another scale than the others, which later parts undo
        for part in (network.after, *(stage.convolution for stage in network.stages)):
            part.weight[:, 0].mul_(1e-4)
    numbers, found = steps_tried(ours, tmp_path)["image"]
    assert numbers == "int8, weights"
    assert [*found] == [str(step) for step in steps_for(tmp_path / "tried" / "image.onnx")]
    assert all(cosine < 0.99 for step, cosine in found.items() if step.startswith("static"))
    small, large = (tmp_path / path for path in ("image.onnx", "tried/image.onnx"))
    assert small.stat().st_size < 0.7 * large.stat().st_size


def test_what_bounds_a_product_is_rounded_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Conv2d(8, 8, 3), nn.Hardtanh(0.0, 1.0))]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
    with torch.no_grad():
        for part in network.parameters():
            part.mul_(8)  # most of what a product gives is cut off
    pixels = torch.rand(32, 8, 16, 16)
    own = network(pixels).detach().numpy()
    write_graph(network, "image", pixels[:2], None, tmp_path / "plain.onnx")
    prepare(tmp_path / "plain.onnx", tmp_path / "image.onnx")

    def cosine() -> float:
        quantize(tmp_path / "image.onnx", Step("static"), tmp_path / "small.onnx", pixels.numpy())
        return cosines(own, OnnxSession(tmp_path / "small.onnx")(pixels.numpy()))["mean"]

    together = cosine()
    monkeypatch.setattr(int8, "BOUNDS", ())
    assert 1 - together < 0.5 * (1 - cosine())


@pytest.mark.parametrize(
    ("cosine", "lost", "keeps"),
    [(0.999, 0.005, True), (0.996, 0.0, True), (0.9951, 0.0, False), (0.999, 0.02, False)],
)
def test_a_step_is_taken_if_it_keeps_cosine_and_recall(
    cosine: float, lost: float, *, keeps: bool
) -> None:
    assert Tried("static", cosine, lost, 0.005).keeps == keeps


@pytest.mark.slow
def test_the_example_runs_by_itself_and_agrees(tmp_path: Path) -> None:
    ours = embedder(SMALL)  # with CLIP's own tokenizer
    captions = [(CAPTIONS[at % len(CAPTIONS)],) for at in range(32)]
    pairs = CheckPairs(Pairs(IMAGES, captions), Pairs(IMAGES, captions), "noise")
    folder = tmp_path / "there"
    folder.mkdir()
    result = write_and_check(find_format("onnx"), Job(ours, folder, pairs))
    assert result["candidates"] == 32
    image = Image.fromarray(DRAW.integers(0, 256, (6, 9, 3), dtype=np.uint8)).resize((90, 60))
    image.save(tmp_path / "photo.png")
    words = [caption for caption in CAPTIONS if "\n" not in caption]
    done = subprocess.run(
        [sys.executable, str(folder / "example.py"), str(tmp_path / "photo.png"), *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": "", "PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stderr
    there = open_exported(folder)
    own = (there.encode_image([tmp_path / "photo.png"]) @ there.encode_text(words).T)[0]
    lines = [line.partition("  ") for line in done.stdout.splitlines()]
    found = {caption: float(score) for score, _, caption in lines}
    for caption, score in zip(words, own, strict=True):
        assert abs(found[caption] - score) < 0.01
    assert lines[0][2] == words[int(own.argmax())]
    wrong = subprocess.run(
        [sys.executable, str(folder / "example.py"), "nothere.jpg", "a dog"],
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 1
    assert "nothere.jpg" in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("after", "said"), [(100, "4.00x smaller"), (404, "1.01x larger"), (400, "the same")]
)
def test_a_file_that_grew_is_not_called_smaller(after: int, said: str) -> None:
    result = {
        "checked_on": "noise",
        "intervals": {"recall_before": (0, 1)},
        "recall_before": 0.5,
        "recall_after": None,
    }
    sizes = {"weights_bytes_before": 400, "weights_bytes": after, "latency": [], "cosine": None}
    assert any(line.endswith(said) for line in table_lines({**result, **sizes}))


def test_the_example_imports_nothing_of_ours() -> None:
    text = (EXAMPLES / "example.py").read_text()
    assert "import lapclip" not in text
    assert "from lapclip" not in text
    assert "torch" not in text


@pytest.mark.parametrize("resize", ["shortest", "squash"])
@pytest.mark.parametrize("kind", ["plain", "transparent", "turned", "grey"])
def test_the_example_sees_images_as_we_do(kind: str, resize: str, tmp_path: Path) -> None:
    import importlib.util

    ours = embedder(replace(SMALL, resize=resize), characters())
    write_json(tmp_path / DESCRIPTION, describe(ours, "onnx", interface(ours)))
    (tmp_path / "example.py").write_text((EXAMPLES / "example.py").read_text())
    spec = importlib.util.spec_from_file_location("example", tmp_path / "example.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    image = Image.fromarray(DRAW.integers(0, 256, (9, 13, 3), dtype=np.uint8)).resize((131, 90))
    if kind == "transparent":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    if kind == "grey":
        image = image.convert("L")
    exif = Image.Exif()
    exif[0x0112] = 6 if kind == "turned" else 1
    image.save(tmp_path / "a.png", exif=exif)
    theirs = example.middle_square(tmp_path / "a.png").astype(int)
    own = middle_square(tmp_path / "a.png", ours.view).astype(int)
    assert np.abs(theirs - own).max() <= 2  # torch and Pillow round differently


def test_an_exported_folder_is_no_model_for_torch(exported: tuple[Embedder, Path]) -> None:
    with pytest.raises(WeightsError, match="another engine than torch"):
        load_torch(exported[1])
    assert isinstance(lapclip.load(exported[1]), OnnxEmbedder)


def test_a_folder_for_another_engine_or_with_damage_is_refused(tmp_path: Path) -> None:
    ours = embedder(SMALL, characters())
    with pytest.raises(WeightsError, match="cannot be read"):
        open_exported(tmp_path)
    write_json(tmp_path / DESCRIPTION, describe(ours, "coreml", interface(ours)))
    with pytest.raises(WeightsError, match="is for coreml"):
        open_exported(tmp_path)
    about = describe(ours, "onnx", interface(ours))
    write_json(tmp_path / DESCRIPTION, {**about, "version": 0})
    with pytest.raises(WeightsError, match="is an export of version 0; this lapclip reads 1"):
        open_exported(tmp_path)
    write_json(tmp_path / DESCRIPTION, describe(ours, "onnx", interface(ours)))
    write_tokenizers(tmp_path, ours.tokenizer)
    (tmp_path / "image.onnx").write_bytes(b"nothing")
    with pytest.raises(WeightsError, match=r"image.onnx cannot be run"):
        open_exported(tmp_path)


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(WeightsError, match=r"needs no_such_package.*\n.*\[export\]"):
        require_packages(("onnx", "no_such_package"), "export")


def test_graphs_carry_no_folder_of_this_computer(exported: tuple[Embedder, Path]) -> None:
    for tower in ("image.onnx", "text.onnx"):
        contents = (exported[1] / tower).read_bytes()
        assert b"transformer.py" not in contents
        assert b"lapclip/model" not in contents


def test_the_description_is_whole(exported: tuple[Embedder, Path]) -> None:
    ours, folder = exported
    about = json.loads((folder / "lapclip.json").read_text())
    assert about["preprocessing"]["side"] == ours.view.side
    assert about["preprocessing"]["resized"] == ours.view.resized
    assert open_exported(folder).view.resized == ours.view.resized
