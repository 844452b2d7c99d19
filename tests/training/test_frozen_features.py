"""Whole runs that start from weights: what is frozen is computed once, and that changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import lapclip
from lapclip.commands.resume import resume
from lapclip.data.ragged import Ragged
from lapclip.embedder import load_torch
from lapclip.errors import ConfigError, DataError, RunError
from lapclip.model.shapes import SHAPES
from lapclip.runs.events import read_events
from lapclip.runs.folder import Run
from lapclip.runs.messages import log_line
from lapclip.training import frozen_features as features
from lapclip.training.array_cache import array_path, read_array, write_array
from lapclip.training.checkpoint import WEIGHTS
from lapclip.training.distributed import ALONE
from lapclip.training.frozen_features import CachedFeatures
from lapclip.training.head_start import start_heads
from lapclip.training.initial_weights import open_towers
from lapclip.training.outcome import TrainOutcome

from ..conftest import SMALL
from ..networks import tiny_text
from ..small_runs import photos, train, write_photos

pytest.importorskip("transformers", reason="the package transformers is not installed")

COMMON = [*SMALL[1:], "train.steps=6", "train.views=2", "train.crop=0.6", "train.flip=0.5"]
OWN = [*COMMON, "model.name=tiny"]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def towers(text_folder: Path) -> list[str]:
    """Settings of a run on two small foreign networks."""
    names = [
        "model.name=towers",
        "model.image_from=tiny-image",
        f"model.text_from={text_folder}",
    ]
    sizes = [
        "model.head=24",
        "model.embedding=16",
        "train.feature_dropout=0.2",
        "train.head_dropout=0.3",
    ]
    return [*COMMON, *names, *sizes]


def losses(name: str) -> list[float]:
    return [
        event["loss"]
        for event in read_events(Path("runs") / name / "events.jsonl")
        if event["type"] == "step"
    ]


def reasons(name: str) -> dict[str, str]:
    return next(read_events(Path("runs") / name / "events.jsonl"))["reasons"]


def notes(name: str) -> str:
    return " ".join(next(read_events(Path("runs") / name / "events.jsonl"))["notes"])


def feature_summary(name: str) -> str:
    """Return what a run says of the features that it computed, or nothing."""
    started = next(read_events(Path("runs") / name / "events.jsonl"))
    return started["reasons"].get("train.features", "")


def train_small(name: str, *settings: str) -> TrainOutcome:
    return train("first-run", list(settings), name=name)


LEARNING = {
    "heads": ["train.image_blocks=0", "train.text_blocks=0", "train.phrases=0.3"],
    "last-blocks": ["train.image_blocks=1", "train.text_blocks=1"],
    "lora": [
        "train.image_blocks=1",
        "train.text_blocks=1",
        "train.lora_rank=2",
        "train.phrases=0.3",
    ],
    "image locked": ["train.image_blocks=0"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, towers: list[str]) -> Callable[[str, str], None]:
    """Puts a finished run on both networks under a name into the current folder; each is trained once."""
    folder = tmp_path_factory.mktemp("finished")

    def put(learns: str, name: str) -> None:
        if not (folder / "runs" / learns).exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                patch.setattr(
                    "lapclip.training.checkpoint.keep_newest", lambda *_: None
                )  # to go on from the first
                train_small(learns, *towers, *LEARNING[learns])
        shutil.copytree(folder / "runs" / learns, Path("runs") / name)

    return put


@pytest.mark.parametrize("learns", LEARNING)
def test_cached_features_give_what_computing_them_each_time_gives(
    here: Path, towers: list[str], learns: str
) -> None:
    cached = train_small("cached", *towers, *LEARNING[learns])
    plain = train_small("plain", *towers, *LEARNING[learns], "train.features=never")
    assert "features of 64 images in 2 views" in feature_summary("cached")
    assert feature_summary("plain") == ""
    assert ("phrases of them" in feature_summary("cached")) == (
        "train.phrases=0.3" in LEARNING[learns]
    )
    np.testing.assert_allclose(losses("cached"), losses("plain"), rtol=0, atol=2e-5)
    one, other = (load_file(f"runs/{name}/model/model.safetensors") for name in ("cached", "plain"))
    assert one.keys() == other.keys()
    # Adam divides by the size of gradients, so those that are almost nothing may take another way.
    assert all(
        torch.allclose(tensor, other[name], rtol=0, atol=2e-3) for name, tensor in one.items()
    )
    assert cached.evaluation is not None
    assert plain.evaluation is not None
    assert cached.evaluation["t2i_r10"] == pytest.approx(plain.evaluation["t2i_r10"], abs=0.01)


def test_the_same_in_batches_whose_captions_are_taken_in_parts(
    here: Path, towers: list[str]
) -> None:
    large = [
        *towers,
        *LEARNING["heads"],
        "data.train_pairs=256",
        "train.batch_size=128",
        "train.steps=3",
    ]
    train_small("cached", *large)
    train_small("plain", *large, "train.features=never")
    np.testing.assert_allclose(losses("cached"), losses("plain"), rtol=0, atol=2e-5)


@pytest.mark.parametrize("learns", ["heads", "last-blocks"])
def test_the_same_of_our_own_towers(here: Path, trained: Path, learns: str) -> None:
    start = [*COMMON, f"train.start={trained}", *LEARNING[learns]]
    train_small("cached", *start)
    train_small("plain", *start, "train.features=never")
    assert "features of" in feature_summary("cached")
    np.testing.assert_allclose(losses("cached"), losses("plain"), rtol=0, atol=2e-5)


def test_features_are_found_again_and_made_anew_when_the_weights_change(
    here: Path, towers: list[str]
) -> None:
    settings = [*towers, *LEARNING["heads"], "data.seed=3"]
    train_small("first", *settings)
    train_small("second", *settings, "train.learning_rate=1e-4")
    train_small("third", *settings, "model.image_taps=2")
    assert "computed once" in feature_summary("first")
    assert "found in the cache" in feature_summary("second")
    assert "computed once" in feature_summary("third")


def test_features_are_made_anew_when_photos_are_seen_otherwise(
    here: Path, towers: list[str]
) -> None:
    photos(here / "photos", 24)
    source = f"data.source={json.dumps(str(here / 'photos'))}"
    settings = [*towers, *LEARNING["heads"], source, "train.batch_size=8", "train.steps=2"]
    for name, seen in {"first": "shortest", "again": "shortest", "other": "squash"}.items():
        train_small(name, *settings, f"model.resize={seen}")
    assert "found in the cache" in feature_summary("again")
    assert "computed once" in feature_summary("other")
    assert losses("other") != losses("first")


def test_features_are_made_anew_when_equal_weights_compute_otherwise(
    here: Path, trained: Path
) -> None:
    shutil.copytree(trained / "model", "mine")
    settings = [*COMMON, "train.start=mine", *LEARNING["heads"], "data.seed=4", "train.steps=2"]
    train_small("first", *settings)
    about = json.loads(Path("mine/config.json").read_text())
    about["model"]["activation"] = "quick_gelu"
    Path("mine/config.json").write_text(json.dumps(about))
    train_small("other", *settings)
    assert "computed once" in feature_summary("other")
    assert losses("other") != losses("first")


@pytest.mark.parametrize("learns", ["heads", "lora"])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    here: Path, runs: Callable[[str, str], None], learns: str
) -> None:
    runs(learns, "whole")
    runs(learns, "cut")
    run = Path("runs/cut")
    for path in run.glob("checkpoints/step-*"):
        if path.name != "step-00000000":
            shutil.rmtree(path)
    lines = [
        line
        for line in (run / "events.jsonl").read_text().splitlines()
        if json.loads(line)["type"] != "finished"
    ]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    for path in array_path().parent.glob("features-*.npy"):  # what is gone is made again
        path.unlink()
    resume("cut")
    again = [event for event in read_events(run / "events.jsonl") if event["type"] == "step"][-6:]
    assert [event["loss"] for event in again] == losses("whole")


def test_a_run_whose_start_is_gone_is_not_resumed_from_chance(
    here: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(embedder: object, folder: Path) -> None:
        raise KeyboardInterrupt

    begin = ("cut", *COMMON, f"train.start={trained}", *LEARNING["heads"])
    with monkeypatch.context() as patch:
        patch.setattr("lapclip.training.run_record.save_model", killed)
        with pytest.raises(KeyboardInterrupt):
            train_small(*begin)
    assert Run(Path("runs/cut")).never_began  # so that the same command begins it
    train_small(*begin)
    run = Path("runs/cut")
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    (run / "events.jsonl").write_text(
        "\n".join(lines[:-1]) + "\n", encoding="utf-8"
    )  # as if it had not finished
    shutil.rmtree(run / "start")
    with pytest.raises(
        RunError, match="start is gone, or the run was killed before it was written"
    ):
        resume("cut")


def test_a_new_text_tower_beside_a_pretrained_one_knows_the_vocabulary_of_the_captions(
    here: Path, towers: list[str]
) -> None:
    own_text = [setting for setting in towers if not setting.startswith("model.text_from")]
    train_small(
        "mixed",
        *own_text,
        "model.name=tiny",
        "train.image_blocks=0",
        "data.tokenizer=bpe",
        "train.steps=2",
    )
    found = load_torch("runs/mixed")
    assert found.model.shape.vocabulary == found.tokenizer.vocabulary > SHAPES["tiny"].vocabulary


def test_micro_batches_change_nothing(
    here: Path, towers: list[str], runs: Callable[[str, str], None]
) -> None:
    runs("last-blocks", "whole")
    train_small("parts", *towers, *LEARNING["last-blocks"], "train.micro_batch=5")
    np.testing.assert_allclose(losses("whole"), losses("parts"), rtol=0, atol=2e-5)


def test_a_run_of_heads_starts_with_few_lines(here: Path, runs: Callable[[str, str], None]) -> None:
    runs("heads", "heads")
    started = next(read_events(Path("runs/heads/events.jsonl")))
    lines = log_line(started).splitlines()
    assert len(lines) <= 6
    assert lines[0].startswith("training: 64 images, ")
    assert "held out" in lines[0]
    assert not any("features of" in line for line in lines)


def test_a_checkpoint_holds_what_learns_and_the_model_is_whole(
    here: Path, runs: Callable[[str, str], None]
) -> None:
    runs("lora", "run")
    saved = load_file(max(Path("runs/run/checkpoints").glob("step-*")) / WEIGHTS)
    assert not any("stem" in name or "word_embeddings" in name for name in saved)
    assert any("lora_up" in name for name in saved)
    model = load_file("runs/run/model/model.safetensors")
    assert model.keys() == load_file("runs/run/start/model.safetensors").keys()
    assert not any("lora" in name for name in model)
    assert lapclip.load("runs/run").encode_text(["a red cat"]).shape == (1, 16)


def test_a_run_from_a_model_starts_where_that_ended_and_keeps_it(here: Path, trained: Path) -> None:
    shutil.copytree(trained, "mine")
    outcome = train_small(
        "next", *COMMON, "train.start=mine", "train.learning_rate=0", "train.steps=2"
    )
    assert outcome.evaluation is not None
    start, end = (load_file(f"runs/next/{part}/model.safetensors") for part in ("start", "model"))
    given = load_file("mine/model/model.safetensors")
    assert all(
        torch.equal(tensor, given[name]) and torch.equal(tensor, end[name])
        for name, tensor in start.items()
    )
    shutil.rmtree("mine")
    assert (
        lapclip.load("runs/next/start").tokenizer.to_dict()
        == lapclip.load("runs/next").tokenizer.to_dict()
    )


def test_the_shape_of_a_model_that_is_there_cannot_be_changed(here: Path, trained: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.embedding cannot be changed: the model has the shape of"
    ):
        train_small("next", *COMMON, f"train.start={trained}", "model.embedding=8")


def test_a_start_that_holds_no_model_is_refused(here: Path) -> None:
    Path("empty").mkdir()
    with pytest.raises(RunError, match="empty holds no model"):
        train_small("next", *COMMON, "train.start=empty")
    assert Run(Path("runs/next")).never_began


def test_a_rate_that_breaks_pretrained_weights_is_warned_about(here: Path, trained: Path) -> None:
    train_small(
        "fast", *COMMON, f"train.start={trained}", "train.learning_rate=1e-3", "train.steps=2"
    )
    assert "far above what pretrained weights stand" in notes("fast")
    train_small(
        "slow", *COMMON, f"train.start={trained}", "train.learning_rate=1e-5", "train.steps=2"
    )
    assert "far above" not in notes("slow")


def test_a_recipe_spares_weights_that_stand_less_than_pretrained_towers(
    here: Path, trained: Path
) -> None:
    some = [
        *COMMON,
        f"train.start={trained}",
        "train.steps=1",
        "train.image_blocks=1",
        "train.text_blocks=1",
    ]
    train("last-blocks", some, name="spared")
    assert "not 0.0002" in reasons("spared")["train.learning_rate"]
    assert "far above" not in notes("spared")


def test_the_recipe_follows_from_how_many_images_there_are(here: Path, trained: Path) -> None:
    outcome = train("auto", [*COMMON, f"train.start={trained}"], name="chosen")
    assert "recipe heads for 64 images: with so few, only the heads are trained" in notes("chosen")
    assert outcome.state == "finished"


def test_half_precision_learns_about_the_same(
    here: Path, towers: list[str], runs: Callable[[str, str], None]
) -> None:
    runs("last-blocks", "exact")
    train_small("half", *towers, *LEARNING["last-blocks"], "train.dtype=bfloat16")
    np.testing.assert_allclose(losses("half"), losses("exact"), rtol=0.05)


def test_features_that_half_precision_cannot_hold_are_kept_whole_or_not_at_all(
    empty_cache: Path,
) -> None:
    small, large = np.ones((2, 3), np.float32), np.full((2, 3), 1e6, np.float32)

    def kept(name: str, *blocks: np.ndarray) -> np.ndarray:
        return features._store(empty_cache / name, (4,), iter(blocks), ALONE, allow_half=True)

    assert kept("small.npy", small, small).dtype == np.float16
    np.testing.assert_array_equal(kept("large.npy", large, small), np.concatenate([large, small]))
    with pytest.raises(features.NotCacheable):
        kept("later.npy", small, large)
    assert sorted(path.name for path in empty_cache.iterdir()) == ["large.npy", "small.npy"]


def test_without_room_for_features_they_are_computed_each_time(
    here: Path, towers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "has_room", lambda path, needed: path.exists())
    train_small("run", *towers, *LEARNING["heads"], "train.seed=9")
    assert "features find no room" in reasons("run")["train.features"]
    assert len(losses("run")) == 6


def test_images_that_the_start_learnt_from_are_no_test_and_are_counted(here: Path) -> None:
    photos = write_photos(here / "photos", [""] * 30)
    settings = [*SMALL[2:], f"data.source={photos}", "train.batch_size=8", "train.steps=2"]
    train_small("first", *settings, "model.name=tiny", "data.seed=0")
    train_small("alike", *settings, "train.start=runs/first", "data.seed=0")
    assert "initial weights were trained on" not in notes("alike")
    train_small("other", *settings, "train.start=runs/first", "data.seed=1")
    assert "initial weights were trained on" in notes("other")
    first, other = (set(np.load(f"runs/{name}/seen.npy").tolist()) for name in ("first", "other"))
    assert first < other  # what the start has seen, this model has seen


ROWS, KIND = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.dtype(np.float32)


def refused(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_an_array_that_another_process_wrote_and_maps_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_array(tmp_path / "features-a.npy", [ROWS], (3, 2), KIND)
    monkeypatch.setattr(os, "replace", refused)  # as on Windows
    assert np.array_equal(write_array(tmp_path / "features-a.npy", [ROWS], (3, 2), KIND), ROWS)
    with pytest.raises(DataError, match="Cannot write features"):
        write_array(tmp_path / "features-b.npy", [ROWS], (3, 2), KIND)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_only_their_owner_can_read_cached_features(tmp_path: Path) -> None:
    write_array(tmp_path / "features-a.npy", [ROWS], (3, 2), KIND)
    assert (tmp_path / "features-a.npy").stat().st_mode & 0o777 == 0o600


def test_a_cache_that_can_only_be_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_array(tmp_path / "features-a.npy", [ROWS], (3, 2), KIND)
    monkeypatch.setattr(os, "utime", refused)
    found = read_array(tmp_path / "features-a.npy")
    assert found is not None
    assert np.array_equal(found, ROWS)


class Captions(list):
    """Training pairs of which nothing but the captions is asked."""

    @property
    def captions(self) -> list:
        return self


@pytest.mark.parametrize("count", [200, 5])
def test_new_heads_start_with_what_fits_both_towers_best(text_folder: Path, count: int) -> None:
    shape = replace(
        SHAPES["towers"],
        image_from="tiny-image",
        text_from=str(text_folder),
        embedding=12,
    )
    model: Any = open_towers(shape)[0]
    image, text = model.image.head, model.text.head
    draw = torch.Generator().manual_seed(0)
    seen, rest = count, 40
    common = torch.randn(seen + rest, 6, generator=draw)
    rows, captions = (
        (common @ torch.randn(6, width, generator=draw)).repeat_interleave(times, 0)
        for width, times in ((image.projection.shape[0], 1), (text.projection.shape[0], 2))
    )
    captions += 0.1 * torch.randn(captions.shape, generator=draw)

    def found() -> float:
        with torch.no_grad():
            scores = (
                F.normalize(image(rows[seen:]), dim=1)
                @ F.normalize(text(captions[2 * seen :: 2]), dim=1).T
            )
        return (scores.argmax(0) == torch.arange(rest)).float().mean().item()

    before = found()
    unused: Any = None
    data: Any = SimpleNamespace(train=Captions([["a", "b"]] * seen))
    cached = CachedFeatures(
        rows[:seen].numpy()[None], Ragged(captions[: 2 * seen].numpy(), None), unused, []
    )
    assert start_heads(model, cached, data)
    assert all(
        head.projection.isfinite().all() and head.projection.norm(dim=0).min() > 0
        for head in (image, text)
    )
    assert found() > 0.7 > 2 * before or count == 5


def test_heads_of_towers_that_learn_start_at_random_and_a_reason_says_so(
    here: Path, towers: list[str], runs: Callable[[str, str], None]
) -> None:
    asked = "train.head_start=closed-form"
    runs("heads", "random")
    train_small("fitted", *towers, *LEARNING["heads"], asked)
    assert losses("fitted")[0] != losses("random")[0]
    assert "train.head_start" not in reasons("fitted")
    runs("last-blocks", "more")
    train_small("asked", *towers, *LEARNING["last-blocks"], asked)
    assert losses("asked") == losses("more")
    assert "heads start at random" in reasons("asked")["train.head_start"]
