"""`lapclip train --teacher`: a small model learns from another, on photos and on drawn images."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lapclip.commands.resume import resume
from lapclip.config import (
    DataConfig,
    ModelConfig,
    build_config,
    parse_settings,
    read_recipe,
    replace_in,
)
from lapclip.data.loading import load_data
from lapclip.data.tokenizers import choose_tokenizer
from lapclip.embedder import Embedder, distinct_captions, load_torch
from lapclip.errors import ConfigError, DataError, LapclipError, RunError
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.runs.events import read_events
from lapclip.runs.folder import Run, find_run
from lapclip.training.checkpoint import save_model
from lapclip.training.objectives.distillation import TeacherVectors
from lapclip.training.outcome import TrainOutcome
from lapclip.training.request import Callbacks
from lapclip.training.teacher import (
    EMBEDDING_CAPTIONS,
    EMBEDDING_IMAGES,
    TeacherFile,
    TeacherModel,
    cached_teacher_embeddings,
    compute_teacher_embeddings,
    fit_width,
    normalize_rows,
    open_teacher,
)

from ..conftest import lapclip, set_flags
from ..small_runs import losses, photos, stop_after, train

STUDENT = [
    "model.name=tiny",
    "train.batch_size=8",
    "train.steps=12",
    "train.device=cpu",
    "train.dtype=float32",
    "train.threads=1",
    "data.tokenizer=characters",
]


@pytest.fixture
def data(here: Path) -> Path:
    return photos(here / "photos")


def source() -> str:
    return f"data.source={json.dumps(str(Path('photos').absolute()))}"


def make_teacher(folder: Path, seed: int = 5, **shape) -> Embedder:
    """A model with weights by chance that sees images otherwise than its student: larger, squeezed, other colours."""
    tokenizer, _ = choose_tokenizer(
        DataConfig(tokenizer="characters"), ["a red wall number 0"], None, 77
    )
    other = {
        "image_size": 48,
        "resize": "squash",
        "pixel_mean": "0.5 0.5 0.5",
        "embedding": 96,
        **shape,
    }
    model = CLIP(
        ModelConfig(**{**vars(SHAPES["tiny"]), **other, "vocabulary": tokenizer.vocabulary}),
        seed=seed,
    )
    embedder = Embedder(model.eval(), tokenizer, Cpu())
    save_model(embedder, folder)
    return embedder


def train_small(
    *settings: str, name: str = "run", callbacks: Callbacks = Callbacks()
) -> TrainOutcome:
    return train("distil", [source(), *STUDENT, *settings], name=name, callbacks=callbacks)


def likeness(model: Embedder, teacher: Embedder, folder: Path) -> float:
    """How much the similarities of a model's images and captions resemble a teacher's."""
    images = sorted(folder.glob("*.png"))
    captions = [
        path.with_suffix(".txt").read_text(encoding="utf-8").splitlines()[0] for path in images
    ]
    both = [one.encode_image(images) @ one.encode_text(captions).T for one in (model, teacher)]
    return float(np.corrcoef(both[0].flatten(), both[1].flatten())[0, 1])


def test_a_taught_model_comes_closer_to_its_teacher_than_an_untaught_one(
    data: Path, here: Path
) -> None:
    teacher = make_teacher(here / "teacher", embedding=64)
    often = [
        "train.steps=80",
        "train.crop=1",
        "train.flip=0",
        "train.symbol_dropout=0",
        "train.warmup=0.1",
    ]
    train_small(*often, "train.teacher=teacher", "train.teacher_weight=1.0", name="taught")
    train_small(*often, "train.teacher_weight=0", name="alone")
    taught, alone = (
        likeness(load_torch(f"runs/{name}"), teacher, data) for name in ("taught", "alone")
    )
    assert taught > alone + 0.2
    steps = [
        event for event in read_events(Path("runs/taught/events.jsonl")) if event["type"] == "step"
    ]
    assert steps[-1]["teacher_loss"] == steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    alone_steps = [
        event for event in read_events(Path("runs/alone/events.jsonl")) if event["type"] == "step"
    ]
    assert not any("teacher_loss" in event for event in alone_steps)


def test_the_loss_is_shared_as_the_weight_says(data: Path, here: Path) -> None:
    make_teacher(here / "teacher")
    first = {}
    for weight in ("0.0", "0.25", "1.0"):
        train_small(
            "train.teacher=teacher", f"train.teacher_weight={weight}", "train.steps=1", name=weight
        )
        (first[weight],) = [
            e for e in read_events(Path(f"runs/{weight}/events.jsonl")) if e["type"] == "step"
        ]
    train_small("train.steps=1", "train.teacher_weight=0", name="alone")
    assert first["0.0"]["loss"] == losses("alone")[1]
    taught = first["1.0"]["loss"]
    assert first["0.25"]["teacher_loss"] == pytest.approx(taught)
    assert first["0.25"]["loss"] == pytest.approx(
        0.75 * losses("alone")[1] + 0.25 * taught, rel=1e-5
    )


def test_embeddings_are_the_teachers_of_each_image_and_caption(data: Path, here: Path) -> None:
    """In the order of the training pairs, as the teacher sees them: not cropped, at its own size, in its colours."""
    teacher = make_teacher(here / "teacher", embedding=64)
    config = build_config(
        [read_recipe("distil"), parse_settings([source(), *STUDENT, "train.teacher=teacher"])],
        SHAPES,
    )
    pairs = load_data(config.data, 32)
    taught = compute_teacher_embeddings(TeacherModel(teacher), config, pairs, None)
    np.testing.assert_allclose(
        taught.vectors.images,
        teacher.encode_image([data / name for name in pairs.train.names]),
        atol=1e-6,
    )
    every = [caption for options in pairs.train.captions for caption in options]
    np.testing.assert_allclose(taught.vectors.captions, teacher.encode_text(every), atol=1e-6)
    assert len(distinct_captions(pairs.train)[0]) == len(every) > len(pairs.train)


def test_drawn_images_are_drawn_at_the_teachers_size(here: Path) -> None:
    teacher = make_teacher(here / "teacher", resize="shortest")
    config = build_config(
        [read_recipe("first-run"), parse_settings(["data.train_pairs=12"])], SHAPES
    )
    drawn = load_data(config.data, 32)
    taught = compute_teacher_embeddings(TeacherModel(teacher), config, drawn, None)
    seen = load_data(config.data, 48).train.pixels
    whole = TeacherVectors(teacher.encode_pixels(seen), taught.vectors.captions)
    np.testing.assert_allclose(taught.vectors.images, fit_width(whole, 128).images, atol=1e-6)


@pytest.mark.parametrize("stream", ["never", "always"])
def test_a_resumed_run_gives_the_same_losses_though_its_teacher_is_gone(
    data: Path, here: Path, stream: str
) -> None:
    make_teacher(here / "teacher")
    settings = ["train.teacher=teacher", f"data.stream={stream}", "train.micro_batch=4"]
    train_small(*settings, name="whole")
    assert train_small(*settings, callbacks=stop_after(5)).state == "stopped"
    shutil.rmtree("teacher")
    assert resume("run").state == "finished"
    assert losses() == losses("whole")
    assert len(losses()) == 12


def test_teacher_embeddings_that_left_the_cache_are_taken_again_from_the_same_teacher_only(
    data: Path, here: Path, empty_cache: Path
) -> None:
    make_teacher(here / "teacher")
    train_small("train.teacher=teacher", name="whole")
    train_small("train.teacher=teacher", callbacks=stop_after(5))
    for path in empty_cache.glob("features-*.npy"):
        path.unlink()
    shutil.move("teacher", "elsewhere")
    with pytest.raises(
        RunError, match=r"The cache no longer has what the teacher made\. .*No run called teacher"
    ):
        resume("run")
    make_teacher(here / "teacher", seed=6)
    with pytest.raises(RunError, match="teacher is not the teacher that the run began with"):
        resume("run")
    shutil.rmtree("teacher")
    shutil.move("elsewhere", "teacher")
    assert resume("run").state == "finished"
    assert losses() == losses("whole")


def test_the_second_run_finds_the_teacher_embeddings_of_the_first(
    data: Path, here: Path, empty_cache: Path
) -> None:
    make_teacher(here / "teacher")
    config = build_config(
        [read_recipe("distil"), parse_settings([source(), *STUDENT, "train.teacher=teacher"])],
        SHAPES,
    )
    pairs = load_data(config.data, 32)
    told: list[str] = []

    def tell(done: int, total: int, what: str = "", /) -> None:
        told.append(what)

    for wanted in ([EMBEDDING_IMAGES, EMBEDDING_CAPTIONS], []):
        told.clear()
        teacher = open_teacher(config)
        assert teacher is not None
        compute_teacher_embeddings(teacher, config, pairs, tell)
        assert list(dict.fromkeys(told)) == wanted
    wider = replace_in(config, "model", embedding=128)
    assert cached_teacher_embeddings(teacher.digest, wider, pairs) is None


def write_file(path: Path, teacher: Embedder, data: Path, **changes: Any) -> None:
    """Write vectors as docs/distil.md shows."""
    images = sorted(data.glob("*.png"))
    captions = [one.with_suffix(".txt").read_text(encoding="utf-8").splitlines() for one in images]
    arrays = {
        "paths": [one.name for one in images],
        "captions": captions,
        "images": teacher.encode_image(images),
        "texts": teacher.encode_text(list(itertools.chain.from_iterable(captions))),
    }
    arrays |= {name: change(arrays[name]) for name, change in changes.items()}
    rows = [
        {"path": name, "captions": texts}
        for name, texts in zip(arrays["paths"], arrays["captions"], strict=True)
    ]
    np.save(path, arrays["images"])
    if arrays["texts"] is not None:
        np.save(path.with_stem(f"{path.stem}-captions"), arrays["texts"])
    path.with_suffix(".json").write_text(json.dumps({"rows": rows}), encoding="utf-8")


def test_a_file_of_embeddings_teaches_as_the_model_that_made_it(data: Path, here: Path) -> None:
    teacher = make_teacher(here / "teacher")
    write_file(here / "teacher.npy", teacher, data, images=lambda rows: 3 * rows)
    train_small("train.teacher=teacher", name="model")
    train_small("train.teacher=teacher.npy", name="file")
    np.testing.assert_allclose(
        list(losses("file").values()), list(losses("model").values()), rtol=1e-4
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"texts": lambda rows: None}, "has no vectors of captions"),
        (
            {"paths": lambda names: [name.replace("7.png", "x.png") for name in names]},
            r'no vector for the image "\d*7\.png", nor for',
        ),
        (
            {"captions": lambda rows: [["?", *row[1:]] for row in rows]},
            "no vector for the caption",
        ),
        ({"images": lambda rows: rows[1:]}, r"float32 of shape \(39, 96\) for 40 images"),
        ({"texts": lambda rows: rows[:, :50]}, "of 96 numbers for images and of 50 for captions"),
        (
            {"images": lambda rows: rows * (np.arange(len(rows)) != 3)[:, None]},
            'the image "003.png" is zero',
        ),
        ({"images": lambda rows: rows.astype(object)}, "cannot be read: .*pickle"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:20],
)
def test_a_file_that_does_not_fit_is_refused_by_name(
    data: Path, here: Path, changes: dict, said: str
) -> None:
    write_file(here / "teacher.npy", make_teacher(here / "teacher"), data, **changes)
    with pytest.raises(LapclipError, match=said) as error:
        train_small("train.teacher=teacher.npy")
    assert "docs/distil.md" in str(error.value)
    assert Run(Path("runs/run")).never_began


@pytest.mark.parametrize("content", ['{"rows": ["a.png"]}', "[]", '{"rows": 3}'])
def test_names_of_another_form_are_refused(here: Path, content: str) -> None:
    np.save("teacher.npy", np.ones((1, 4), np.float32))
    Path("teacher.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"teacher\.npy cannot be read"):
        TeacherFile(Path("teacher.npy"))


def test_a_parquet_file_needs_its_package(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("lapclip.data.vector_files.find_spec", lambda name: None)
    with pytest.raises(DataError, match="which needs pyarrow"):
        TeacherFile(Path("teacher.parquet"))


def test_a_file_cannot_teach_about_drawn_images(data: Path, here: Path) -> None:
    write_file(here / "teacher.npy", make_teacher(here / "teacher"), data)
    with pytest.raises(DataError, match="drawn scenes are no files"):
        train("first-run", [*STUDENT, "data.train_pairs=64", "train.teacher=teacher.npy"])


def test_a_teacher_that_holds_no_model_is_refused_before_any_image_is_read(here: Path) -> None:
    photos(here / "photos", 12)
    Path("nothing").mkdir()
    for name, said in (("nothing", "nothing holds no model"), ("gone", "No run called gone")):
        with pytest.raises(ConfigError, match=said):
            train_small(f"train.teacher={name}")
    Path("broken.json").write_text('{"rows": []}')
    Path("broken.npy").write_bytes(b"\x93NUMPY not an array")
    with pytest.raises(ConfigError, match=r"broken\.npy cannot be read"):
        train_small("train.teacher=broken.npy")


def test_the_command_takes_a_run_by_its_name(data: Path, here: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"Recipe distil learns from a teacher, and none is named\.\n.*--teacher RUN",
    ):
        train_small("train.steps=2", name="large")
    train_small("train.steps=2", "train.teacher_weight=0", name="large")
    flags = set_flags(*STUDENT, "train.steps=2")
    done = lapclip(
        "train",
        "photos",
        "--recipe",
        "distil",
        "--teacher",
        "large",
        "--name",
        "small",
        "--json",
        *flags,
    )
    assert done.returncode == 0, done.stderr
    assert "the teacher embeds" in done.stderr
    assert "large teaches: " in find_run("small").read_settings()["reasons"]["train.teacher"]
    assert json.loads(done.stdout)["state"] == "finished"


def test_wider_embeddings_keep_their_similarities_and_narrower_ones_keep_them_exactly() -> None:
    draw = np.random.default_rng(0)
    hidden, image_noise, text_noise = (draw.normal(size=(200, size)) for size in (6, 40, 40))
    turn = draw.normal(size=(6, 40))
    whole = TeacherVectors(
        normalize_rows(hidden @ turn + 0.1 * image_noise),
        normalize_rows(hidden @ turn + 0.1 * text_noise),
    )

    def correlation(vectors: TeacherVectors) -> float:
        """Return how well similarities of other vectors follow those of the whole ones."""
        similarities = (vectors.images @ vectors.captions.T).flatten()
        return np.corrcoef((whole.images @ whole.captions.T).flatten(), similarities)[0, 1]

    for width, least in ((8, 0.99), (40, 0.999999), (64, 0.999999)):
        fitted = fit_width(whole, width)
        assert fitted.images.shape == (200, width)
        np.testing.assert_allclose(np.linalg.norm(fitted.captions, axis=1), 1, atol=1e-6)
        assert correlation(fitted) > least
    cut = [normalize_rows(rows[:, :8]) for rows in (whole.images, whole.captions)]
    assert correlation(TeacherVectors(*cut)) < 0.99
