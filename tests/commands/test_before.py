"""`eval --before`: what changed since another model, and the blend of both."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lapclip as package
from lapclip.cli.train import summary
from lapclip.commands.evaluate import evaluate
from lapclip.commands.evaluation_data import ChosenData, EvaluationRequest
from lapclip.embedder import load_torch
from lapclip.errors import LapclipError
from lapclip.evaluation import RANKS, WAYS
from lapclip.runs.events import mapping, read_events
from lapclip.runs.messages import log_line
from lapclip.runs.trend import RECALLS
from lapclip.training.checkpoint import save_model
from lapclip.training.outcome import TrainOutcome

from ..conftest import SMALL, lapclip
from ..small_runs import train, write_classes, write_photos
from ..weights.made import SHAPE, embedder

START = "runs/mine/start"
SPLITS = ["train"] * 24 + ["val"] * 20 + ["test"] * 20


def spell(photos: Path) -> None:
    """Numbers in captions become letters: the model to start from knows no digits, and would read all as the same."""
    table = photos / "captions.csv"
    lines = [line.split(",") for line in table.read_text(encoding="utf-8").splitlines()]
    digits = str.maketrans("0123456789", "abcdefghim")
    table.write_text(
        "\n".join(f"{a},{b.translate(digits)},{c}" for a, b, c in lines), encoding="utf-8"
    )


@pytest.fixture(scope="module")
def tuned(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainOutcome]:
    """A folder with photos and a run on them that began from a trained model; the last image block and heads learnt."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        spell(write_photos(Path("photos"), SPLITS))
        settings = [setting for setting in SMALL if not setting.startswith(("model", "data"))]
        settings += [
            f"train.start={trained}",
            f"data.source={folder / 'photos'}",
            "train.learning_rate=3e-3",
        ]
        settings += ["train.image_blocks=1", "train.text_blocks=0"]
        outcome = train("first-run", settings, name="mine")
    return folder, outcome


@pytest.fixture
def mine(tuned: tuple[Path, TrainOutcome], here: Path) -> Path:
    """A copy of it, with its photos beside it."""
    shutil.copytree(tuned[0] / "runs", here / "runs")
    shutil.copytree(tuned[0] / "photos", here / "photos")
    return here / "runs" / "mine"


def turned(folder: Path) -> None:
    """Turn images upside down: drawn from the same noise, they are to be others than those of the run."""
    for path in folder.rglob("*.png"):
        Image.open(path).rotate(180).save(path)


def compare(**options: Any) -> dict[str, Any]:
    """Compare the run with its start."""
    return evaluate(EvaluationRequest("mine", device="cpu", before=START, **options))


def mean_recall(model: str, data: Path, split: str | None = None) -> float:
    scores = evaluate(EvaluationRequest(model, str(data), split, device="cpu"))["evaluation"]
    return float(np.mean([scores[f"{way}_r{rank}"] for way in WAYS for rank in RANKS]))


def test_training_ends_with_the_score_of_the_start_beside_its_own(
    tuned: tuple[Path, TrainOutcome],
) -> None:
    folder, outcome = tuned
    assert outcome.evaluation is not None
    assert outcome.start_evaluation is not None
    plain = evaluate(
        EvaluationRequest(str(folder / "runs/mine/start"), str(folder / "photos"), device="cpu")
    )
    assert plain["split"] == outcome.start_evaluation["split"] == "test"
    for name in ("t2i_r1", "t2i_r10", "i2t_r5", "t2i_mean_reciprocal_rank"):
        assert outcome.start_evaluation[name] == plain["evaluation"][name]
    assert (
        outcome.start_evaluation["t2i_mean_reciprocal_rank"]
        != outcome.evaluation["t2i_mean_reciprocal_rank"]
    )
    last = list(read_events(folder / "runs/mine/events.jsonl"))[-1]
    assert last["start_evaluation"] == json.loads(json.dumps(outcome.start_evaluation))
    assert "; at the start test text to image R@1/5/10" in (folder / "runs/mine/log.txt").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("falls", [True, False])
def test_the_end_says_that_the_scores_fell(
    tuned: tuple[Path, TrainOutcome], monkeypatch: pytest.MonkeyPatch, falls: bool
) -> None:
    folder, outcome = tuned
    monkeypatch.chdir(folder)
    before, after = (0.5, 0.4) if falls else (0.4, 0.5)
    scores = [
        {**mapping(outcome.evaluation), **dict.fromkeys(RECALLS, recall)}
        for recall in (before, after)
    ]
    ended = replace(outcome, start_evaluation=scores[0], evaluation=scores[1])
    told = "Training made the model worse" in "\n".join(summary(ended))
    logged = log_line({**ended.to_dict(), "type": "finished"}).endswith("better model")
    assert told == logged == falls


def test_the_change_is_between_what_each_model_scores_alone(
    mine: Path, tuned: tuple[Path, Any]
) -> None:
    photos = tuned[0] / "photos"
    result = compare(check=("scenes",))
    own, scenes = result["before"]["changes"]
    assert (own["split"], own["images"], own["trained_on"]) == ("test", 20, 0)
    assert own["before"] == pytest.approx(mean_recall(START, photos), abs=1e-12)
    assert own["after"] == pytest.approx(mean_recall("runs/mine/model", photos), abs=1e-12)
    low, high = own["change_interval"]
    assert low <= own["after"] - own["before"] <= high
    assert (scenes["data"], scenes["images"], scenes["split"]) == ("scenes", 240, "test")
    start = evaluate(EvaluationRequest(START, str(photos), device="cpu"))["evaluation"]
    for name, value in result["before"]["recalls"].items():
        assert value == start[name]
    assert "On photos, mean recall" in result["before"]["summary"]
    assert "On scenes, mean recall" in result["before"]["summary"]
    assert result["before"]["blend"] is None
    assert not (mine / "blended").exists()
    page = (mine / "evaluation/test/evaluation.md").read_text(encoding="utf-8")
    assert "On scenes, mean recall" in page


def test_the_blend_that_is_best_on_val_is_written_and_scored(
    mine: Path, tuned: tuple[Path, Any]
) -> None:
    photos = tuned[0] / "photos"
    before = compare(blend=True)["before"]
    blend = before["blend"]
    scores = dict(blend["validation"])
    assert list(scores) == [tenth / 10 for tenth in range(11)]
    assert scores[blend["share"]] == max(scores.values())
    assert scores[0.0] == pytest.approx(mean_recall(START, photos, "val"), abs=1e-12)
    assert scores[1.0] == pytest.approx(mean_recall("runs/mine/model", photos, "val"), abs=1e-12)
    assert {path.name for path in mine.joinpath("blended").iterdir()} == {
        "model.safetensors",
        "config.json",
    }
    blended = before["changes"][0]["blended"]
    assert blended == pytest.approx(mean_recall("runs/mine/blended", photos), abs=1e-12)
    models = [load_torch(f"runs/mine/{name}").model for name in ("start", "model", "blended")]
    first, last, between = (model.state_dict() for model in models)
    for name, tensor in between.items():
        expected = (1 - blend["share"]) * first[name] + blend["share"] * last[name]
        np.testing.assert_allclose(tensor, expected, atol=1e-6)
    assert str(mine.relative_to(Path.cwd()) / "blended") in before["summary"]
    warning = "the same pairs chose the blend"
    assert warning not in before["summary"]
    assert warning in compare(blend=True, split="val")["before"]["summary"]


def test_checks_are_classes_or_captions(mine: Path) -> None:
    turned(write_classes(Path("things"), 6))
    turned(write_photos(Path("other"), [""] * 8))
    _, things, other = compare(check=("things", "other"))["before"]["changes"]
    assert (things["measure"], other["measure"]) == (
        "mean recall of the classes",
        "mean recall",
    )
    plain = evaluate(EvaluationRequest(START, "things", device="cpu"))["zeroshot"]
    assert things["before"] == plain["mean_per_class"]
    assert (things["chance"], things["trained_on"]) == (0.5, 0)


def test_check_images_that_the_run_learned_from_are_counted(
    mine: Path, tuned: tuple[Path, Any]
) -> None:
    shutil.copytree(tuned[0] / "photos", "copy")
    lines = Path("copy/captions.csv").read_text(encoding="utf-8").splitlines()
    bare = "\n".join(line.rpartition(",")[0] for line in lines)
    Path("copy/captions.csv").write_text(bare + "\n", encoding="utf-8")
    before = compare(check=("copy",))["before"]
    assert before["changes"][1]["trained_on"] == 24
    assert "The model learned from 24 of these" in before["summary"]


def test_a_model_that_sees_images_at_another_size_is_compared(mine: Path) -> None:
    save_model(embedder(replace(SHAPE, image_size=48)), Path("wide"))
    before = evaluate(EvaluationRequest("mine", device="cpu", before="wide"))["before"]
    assert before["changes"][0]["images"] == 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"check": ("scenes",)}, "--check needs a model to compare with"),
        ({"blend": True}, "--blend needs a model to compare with"),
        ({"before": "yours"}, "No run called yours"),
        ({"before": START, "check": ("nowhere",)}, "There is no nowhere"),
        ({"before": START, "check": ("photos",)}, "is what the run learned from"),
        ({"before": START, "blend": True, "data": "other"}, "The data has no split val"),
        ({"before": START, "blend": True, "model": START}, "is not a run"),
        ({"before": "wide", "blend": True}, "The models cannot be blended: "),
    ],
)
def test_requests_that_cannot_be_met_are_refused_before_anything_is_scored(
    mine: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(ChosenData, "encode", None)
    write_photos(Path("other"), ["test"] * 4)
    save_model(embedder(replace(SHAPE, image_size=48)), Path("wide"))
    with pytest.raises(LapclipError, match=words):
        evaluate(replace(EvaluationRequest("mine", device="cpu"), **options))
    assert not (mine / "evaluation").exists()
    assert not (mine / "blended").exists()


def test_the_command_prints_a_paragraph_and_python_returns_the_same(mine: Path) -> None:
    shown = lapclip("eval", "mine", "--before", START, "--check", "scenes", "--device", "cpu")
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert "before, text to image" in text
    assert f"Since {Path(START)}: On photos, mean recall" in text
    found = package.evaluate("mine", before=START, check=["scenes"], device="cpu", progress=False)
    assert found["before"]["summary"] in text
    saved = (mine / "evaluation/test/evaluation.json").read_text(encoding="utf-8")
    assert json.loads(saved)["before"] == json.loads(json.dumps(found["before"]))
