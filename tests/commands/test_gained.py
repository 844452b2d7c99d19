"""What a run has gained and forgotten, from the command to the account."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lapclip.commands.evaluate import EvaluationRequest, evaluate
from lapclip.commands.gained import (
    ALPHAS,
    FEWER,
    EvaluationSet,
    GainedRequest,
    evaluate_set,
    gained,
)
from lapclip.commands.train import Outcome, train
from lapclip.config import DataConfig
from lapclip.data.loading import load_data
from lapclip.embedder import load_torch
from lapclip.errors import LapclipError
from lapclip.evaluation.forgetting import Blend
from lapclip.evaluation.short_questions import evaluate_short_questions, short_questions
from lapclip.runs.events import read_events

from ..conftest import SMALL, lapclip
from ..small_runs import write_classes, write_photos

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
def tuned(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
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
def mine(tuned: tuple[Path, Outcome], here: Path) -> Path:
    """A copy of it."""
    shutil.copytree(tuned[0] / "runs", here / "runs")
    return here / "runs" / "mine"


def turned(folder: Path) -> None:
    """Turn images upside down: drawn from the same noise, they are to be others than those of the run."""
    for path in folder.rglob("*.png"):
        Image.open(path).rotate(180).save(path)


def run(**wanted: Any) -> dict[str, Any]:
    told: list[tuple[str, int, int]] = []
    result = gained(
        GainedRequest(device="cpu", **wanted),
        None,
        lambda what: lambda done, total: told.append((what, done, total)),
    )
    assert all(0 <= done <= total for _, done, total in told)
    assert {what for what, done, total in told if done == total} == {
        f"embedding {one['name']}, start to end" for one in (result["new"], *result["checks"])
    }
    return result


def test_training_ends_with_the_score_of_the_start_beside_its_own(
    tuned: tuple[Path, Outcome],
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


def test_the_ends_of_the_curves_are_the_scores_of_start_and_end(
    mine: Path, tuned: tuple[Path, Any]
) -> None:
    photos = str(tuned[0] / "photos")
    result = run()
    assert result["alphas"] == ALPHAS
    assert result["shared"] == {"image": [1, 2], "text": [2, 2]}
    new = result["new"]
    assert (new["split"], new["pictures"], new["trained_on"]) == ("test", 20, 0)
    for kind, model in (("before", "runs/mine/start"), ("after", "runs/mine/model")):
        plain = evaluate(EvaluationRequest(model, photos, device="cpu"))["evaluation"]
        assert {name: plain[name] for name in new[kind]} == new[kind]
    assert [point["alpha"] for point in new["curve"]] == ALPHAS
    assert new["before"]["t2i_mean_reciprocal_rank"] != new["after"]["t2i_mean_reciprocal_rank"]
    assert result["model"] is None
    assert not (mine / "blended").exists()
    (scenes,) = result["checks"]
    assert (scenes["name"], scenes["pictures"], scenes["split"]) == ("scenes", 240, "test")
    start = load_torch("runs/mine/start", "cpu")
    pairs = load_data(DataConfig(train_pairs=2, min_pairs=2), start.view).splits["test"]
    questions = short_questions(pairs.captions)
    assert questions is not None
    asked = start.encode_pixels(pairs.pixels), start.encode_text(questions.texts)
    plain = evaluate_short_questions(*asked, questions)
    assert scenes["before"]["short_questions"]["map"] == pytest.approx(plain["map"], abs=1e-6)
    kept = json.loads((mine / "gained" / "gained.json").read_text(encoding="utf-8"))
    assert kept.pop("written_by")
    assert kept == json.loads(
        json.dumps({name: value for name, value in result.items() if name != "files"})
    )
    assert [Path(path).name for path in result["files"]] == [
        "gained.html",
        "gained.md",
        "gained.json",
    ]
    assert result["summary"] in Path(result["files"][1]).read_text(encoding="utf-8")


def test_the_mixture_that_is_written_scores_what_the_account_says(
    mine: Path, tuned: tuple[Path, Any]
) -> None:
    photos = str(tuned[0] / "photos")
    result = run(alpha="0.37", run="mine", out=Path("shared"))
    assert result["alphas"] == sorted([*ALPHAS, 0.37])
    assert (result["model"], result["model_alpha"]) == (str(Path("runs/mine/blended")), 0.37)
    assert {path.name for path in mine.joinpath("blended").iterdir()} == {
        "model.safetensors",
        "config.json",
    }
    plain = evaluate(EvaluationRequest("runs/mine/blended", photos, device="cpu"))["evaluation"]
    recalls = [plain[f"{way}_r{place}"] for way in ("t2i", "i2t") for place in (1, 5, 10)]
    (point,) = [point for point in result["new"]["curve"] if point["alpha"] == 0.37]
    assert point["value"] == pytest.approx(np.mean(recalls), abs=1e-12)
    models = (load_torch(f"runs/mine/{name}").model for name in ("start", "model", "blended"))
    first, last, between = (model.state_dict() for model in models)
    for name, tensor in between.items():
        np.testing.assert_allclose(tensor, 0.63 * first[name] + 0.37 * last[name], atol=1e-6)
    assert Path("shared/gained.html").exists()
    assert not (mine / "gained").exists()
    best = run(alpha="auto")
    assert best["model_alpha"] == best["alpha"]
    state = load_torch("runs/mine/blended").model.state_dict()
    np.testing.assert_allclose(
        state["logit_scale"],
        (1 - best["alpha"]) * first["logit_scale"] + best["alpha"] * last["logit_scale"],
        atol=1e-6,
    )


def test_checks_are_classes_or_captions_and_those_not_known_do_not_decide(mine: Path) -> None:
    turned(write_classes(Path("things"), 6))
    turned(write_photos(Path("other"), [""] * 8))
    result = run(checks=["things", "other", "things", "scenes"])
    assert [(check["name"], check["figure"]) for check in result["checks"]] == [
        ("scenes", "mean recall"),
        ("things", "zero-shot, mean of classes"),
        ("other", "mean recall"),
    ]
    things = result["checks"][1]
    plain = evaluate(EvaluationRequest("runs/mine/start", "things", device="cpu"))["zeroshot"]
    assert (
        things["before"]["mean_per_class"] == things["curve"][0]["value"] == plain["mean_per_class"]
    )
    assert things["chance"] == 0.5
    assert not things["decides"]
    assert any(note.startswith("things does not decide: the start's") for note in result["notes"])
    assert things["trained_on"] == 0
    assert result["checks"][0]["decides"]  # the start learnt from other scenes
    assert "scenes" in result["summary"]
    assert "things" not in result["summary"]
    assert any(note.startswith("other: Only 8 images") for note in result["notes"])


def test_images_that_the_run_learnt_from_do_not_decide(mine: Path, tuned: tuple[Path, Any]) -> None:
    shutil.copytree(tuned[0] / "photos", "copy")
    lines = Path("copy/captions.csv").read_text(encoding="utf-8").splitlines()
    bare = "\n".join(line.rpartition(",")[0] for line in lines)
    Path("copy/captions.csv").write_text(bare + "\n", encoding="utf-8")
    result = run(checks=["copy"])
    assert result["checks"][1]["trained_on"] == 24
    assert not result["checks"][1]["decides"]
    assert "copy does not decide, because the run learnt from some of it." in result["notes"]


def test_an_interrupted_command_keeps_what_was_scored_and_goes_on(
    mine: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[str] = []

    def interrupted(blend: Blend, one: EvaluationSet, *rest: Any) -> dict[str, Any]:
        if one.name == "scenes":
            raise KeyboardInterrupt
        return count_scored(blend, one, *rest)

    def count_scored(blend: Blend, one: EvaluationSet, *rest: Any) -> dict[str, Any]:
        scored.append(one.name)
        return evaluate_set(blend, one, *rest)

    monkeypatch.setattr("lapclip.commands.gained.evaluate_set", interrupted)
    told = lapclip("gained", "--device", "cpu")
    assert told.returncode == 130
    assert "photos" in told.stderr
    assert "lapclip gained" in told.stderr
    assert not (mine / "gained").exists()
    monkeypatch.setattr("lapclip.commands.gained.evaluate_set", count_scored)
    resumed = run()
    assert scored == ["photos", "scenes"]
    assert (
        run(alpha="auto")["alpha"] == resumed["alpha"]
    )  # the command that is offered next scores nothing anew
    assert scored == ["photos", "scenes"]
    shutil.rmtree(empty_cache)
    afresh = run()
    assert [json.dumps(afresh[part]) for part in ("new", "checks", "why")] == [
        json.dumps(resumed[part]) for part in ("new", "checks", "why")
    ]


def test_large_towers_are_mixed_at_fewer_alphas(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapclip.commands.gained.LARGE", 1000)
    assert run()["alphas"] == FEWER


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"alpha": "2"}, "--alpha must be auto or a number from 0 to 1, not 2"),
        ({"alpha": "some"}, "--alpha must be auto"),
        ({"checks": ["nowhere"]}, "There is no nowhere"),
        ({"run": "yours"}, "No run called yours"),
    ],
)
def test_what_cannot_be_is_named(mine: Path, wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(LapclipError, match=words):
        run(**wanted)
    assert not (mine / "gained").exists()


def test_the_runs_own_data_is_no_check_of_it(mine: Path, tuned: tuple[Path, Any]) -> None:
    with pytest.raises(LapclipError, match="scored as the new data"):
        run(checks=[str(tuned[0] / "photos")])


def test_a_run_from_scratch_has_nothing_to_forget(trained: Path, here: Path) -> None:
    shutil.copytree(trained, "runs/scratch")
    with pytest.raises(LapclipError, match="did not begin from a trained model"):
        run()


def test_the_command_prints_the_account_and_what_is_next(mine: Path) -> None:
    told = lapclip("gained", "--device", "cpu")
    assert told.returncode == 0, told.stderr
    for words in (
        "Fine-tuning",
        "before   after",
        "text to image, R@10",
        "scenes (test), mean recall",
        "Recommended: alpha",
    ):
        assert words in told.stdout
    assert (
        told.stdout.strip()
        .splitlines()[-1]
        .startswith("Next: open runs/mine/gained/gained.html in a browser, or")
    )
    done = lapclip("gained", "mine", "--alpha", "auto", "--device", "cpu", "--json")
    result = json.loads(done.stdout)
    assert result.keys() >= {"run", "alpha", "alphas", "new", "checks", "model", "files"}
    assert result["new"].keys() >= {"before", "after", "curve"}
    assert all(Path(path).exists() for path in [result["model"], *result["files"]])
    report = lapclip("report")
    assert report.returncode == 0
    assert "Gained and forgotten" in (mine / "report.md").read_text(encoding="utf-8")
