"""`lapclip train` on a folder of images with captions."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from lapclip.cli.train import summary
from lapclip.commands.evaluate import evaluate
from lapclip.commands.evaluation_data import EvaluationRequest
from lapclip.commands.resume import resume
from lapclip.config import build_config, read_recipe
from lapclip.embedder import load
from lapclip.errors import DataError, RunError
from lapclip.evaluation import note_on_few
from lapclip.model.shapes import SHAPES
from lapclip.runs.events import read_events
from lapclip.runs.folder import Run
from lapclip.training import held_out_scores
from lapclip.training.outcome import TrainOutcome
from lapclip.training.request import Callbacks

from ..conftest import counted_reads, lapclip, set_flags
from ..small_runs import losses, photos, prepared, stop_after, train, write_photos

TINY = [
    "model.image_size=32",
    "model.image_width=8",
    "model.image_layers=4",
    "model.text_width=32",
    "model.text_heads=2",
    "model.embedding=32",
    "train.cheap_size=16",
    "train.batch_size=8",
    "train.steps=12",
    "train.device=cpu",
    "train.dtype=float32",
    "train.threads=1",
]


def train_on_photos(
    *settings: str, name: str = "run", callbacks: Callbacks = Callbacks()
) -> TrainOutcome:
    source = f"data.source={json.dumps(str(Path('photos').absolute()))}"
    return train("photos", [source, *TINY, *settings], name=name, callbacks=callbacks)


def test_a_folder_of_images_is_trained_on_and_scored_from_the_command(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos")
    reads = counted_reads(monkeypatch)
    done = lapclip("train", "photos", "--json", *set_flags(*TINY))
    assert done.returncode == 0, done.stderr
    assert len(reads) == 1  # to choose the recipe and to learn from
    outcome = json.loads(done.stdout)
    assert outcome["data"] == str(here / "photos")
    assert "a caption a line in the .txt beside each image" in done.stderr
    settings = tomllib.loads((here / "runs/photos/run.toml").read_text(encoding="utf-8"))
    assert settings["run"]["recipe"] == "photos"
    assert settings["data"]["stream"] == "never"
    assert "data.tokenizer" in settings["reasons"]
    assert settings["data"]["split_rule"] == "content"
    assert settings["reasons"]["data.split_rule"].startswith("drawn by content")
    (started,) = [
        event
        for event in read_events(here / "runs/photos/events.jsonl")
        if event["type"] == "started"
    ]
    assert any(note.startswith("few held-out images (val ") for note in started["notes"])
    scored = lapclip("eval", "--json", "--device", "cpu")
    assert scored.returncode == 0, scored.stderr
    account = json.loads(scored.stdout)
    assert account["evaluation"]["t2i_r1"] == outcome["evaluation"]["t2i_r1"]
    few = note_on_few(account["evaluation"]["candidates"])
    assert "so these scores say little" in few[0]
    assert few[0] in account["notes"]
    assert few[0] in summary(TrainOutcome(**outcome))
    assert note_on_few(20) == []
    model = load("runs/photos")
    assert model.encode_image([here / "photos/000.png"]).shape == (1, 32)


@pytest.mark.parametrize("stream", ["never", "always"])
def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(here: Path, stream: str) -> None:
    photos(here / "photos")
    train_on_photos(f"data.stream={stream}", name="whole")
    stopped = train_on_photos(f"data.stream={stream}", callbacks=stop_after(5))
    assert stopped.state == "stopped"
    assert resume("run").state == "finished"
    assert losses() == losses("whole")
    assert len(losses()) == 12


def test_a_run_whose_images_changed_is_not_resumed(here: Path) -> None:
    photos(here / "photos")
    train_on_photos(callbacks=stop_after(5))
    Image.new("RGB", (50, 50), "black").save(here / "photos/001.png")
    with pytest.raises(RunError, match=r"images, captions or splits in .*photos have changed"):
        resume("run")


def test_a_run_is_scored_on_the_pairs_that_its_split_rule_held_out(here: Path) -> None:
    photos(here / "photos")
    train_on_photos("data.split_rule=name", callbacks=stop_after(5))
    path = here / "runs/run/run.toml"
    before = path.read_text(encoding="utf-8")
    assert resume("run").state == "finished"  # refused where its data is another
    scored = evaluate(EvaluationRequest("run", device="cpu"))
    assert scored["trained_on"] == 0
    path.write_text(before.replace('"name"', '"content"'), encoding="utf-8")
    assert (
        evaluate(EvaluationRequest("run", device="cpu"))["trained_on"] > 0
    )  # else the test shows nothing


def test_data_that_was_moved_is_named_again(here: Path) -> None:
    photos(here / "photos")
    train_on_photos(callbacks=stop_after(5))
    (here / "photos").rename(here / "elsewhere")
    with pytest.raises(RunError, match=r"lapclip resume run --data FOLDER"):
        resume("run")
    assert resume("run", data="elsewhere").state == "finished"
    run = Run(Path("runs/run"))
    assert run.read_settings()["data"]["source"] == str(here / "elsewhere")
    assert 'source = "./elsewhere"' in run.settings.read_text(encoding="utf-8")


def test_a_batch_made_for_more_images_becomes_as_large_as_the_data(here: Path) -> None:
    photos(here / "photos", 12)
    source = f"data.source={json.dumps(str(here / 'photos'))}"
    settings = [setting for setting in TINY if "batch_size" not in setting]
    setup = prepared("photos", [source, *settings], None)
    assert setup.config.train.batch_size == len(setup.data.train) < 12
    assert "no more training images" in setup.reasons["train.batch_size"]
    assert not any("batch_size" in note for note in setup.notes)
    with pytest.raises(DataError, match=r"train\.batch_size 50 is more than"):
        prepared("photos", [source, *settings, "train.batch_size=50"], None)


def test_a_run_ends_early_where_nothing_gets_better(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos")
    monkeypatch.setattr(
        held_out_scores, "merit_of", lambda *_: 0.5
    )  # as good as ever, and no better
    outcome = train_on_photos(
        "train.steps=60",
        "train.patience=2",
        "train.evaluate_every_epochs=1",
        "train.cheap_share=0.5",
    )
    found = list(read_events(Path("runs/run/events.jsonl")))
    per_epoch = next(event["step"] for event in found if event["type"] == "evaluation")
    assert outcome.state == "finished"
    # Not before the end of the cheap part, and two evaluations after it.
    assert 30 + 2 * per_epoch <= outcome.steps <= 30 + 3 * per_epoch
    assert outcome.early == found[-1]["early"] == f"no better score since step {per_epoch}"
    assert "no better score since" in Path("runs/run/log.txt").read_text(encoding="utf-8")


def test_a_run_that_reaches_its_last_step_did_not_end_early(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos")
    monkeypatch.setattr(held_out_scores, "merit_of", lambda *_: 0.5)
    settings = (
        "train.patience=1",
        "train.evaluate_every_epochs=1",
        "train.cheap_share=0",
        "train.cheap_size=0",
    )
    per_epoch = train_on_photos("train.steps=60", *settings, name="first").steps // 2
    outcome = train_on_photos(f"train.steps={2 * per_epoch}", *settings, name="second")
    assert (outcome.steps, outcome.early) == (2 * per_epoch, "")


@pytest.mark.parametrize("recipe", ["heads", "lora"])
def test_recipes_for_few_photos_stop_by_themselves(recipe: str) -> None:
    settings = build_config([read_recipe(recipe)], SHAPES).train
    assert 0 < settings.patience * settings.evaluate_every_epochs <= settings.epochs / 2


def test_one_of_many_equal_scores_is_marked_and_the_measure_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos")
    monkeypatch.setattr(held_out_scores, "merit_of", lambda *_: 0.5)
    outcome = train_on_photos("train.evaluate_every_epochs=1", "train.patience=0")
    found = list(read_events(Path("runs/run/events.jsonl")))
    marked = [event["step"] for event in found if event["type"] == "evaluation" and event["best"]]
    assert marked == [outcome.best_step] == [found[-1]["best_step"]]
    log = Path("runs/run/log.txt").read_text(encoding="utf-8")
    assert log.count("best so far (mean recall ") == 1
    assert f"the model of step {outcome.best_step} is kept" in log
    kept = (
        f"model kept    that of step {outcome.best_step} of {outcome.steps}, which did best on val"
    )
    assert kept in summary(outcome)


def test_the_best_model_of_classes_is_the_one_that_tells_most_of_them_apart(here: Path) -> None:
    photos(here / "flat")
    for at, path in enumerate(sorted((here / "flat").glob("*.png"))):
        folder = here / "photos" / ("red", "green", "blue")[at % 3]
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    outcome = train_on_photos("train.evaluate_every_epochs=1")
    assert not any(
        "among 1,000" in line for line in summary(outcome)
    )  # many images share each caption
    scored = [
        event
        for event in read_events(Path("runs/run/events.jsonl"))
        if event["type"] == "evaluation"
    ]
    told = [event["evaluation"]["zeroshot_top1"] for event in scored]
    assert all(0 <= share <= 1 for share in told)
    kept = [event for event in scored if event["best"]][-1]
    assert kept["evaluation"]["zeroshot_top1"] == max(told)


def test_fewer_than_ten_pairs_are_refused_unless_asked_for(here: Path) -> None:
    photos(here / "photos", 9)
    for more in ([], ["--background"]):
        refused = lapclip("train", "photos", "--recipe", "photos", *more, *set_flags(*TINY))
        assert refused.returncode == 2
        assert "Training needs at least 10 pairs; photos/ has 9." in refused.stderr
        assert "--set data.min_pairs=2" in refused.stderr
    assert not (here / "runs").exists()
    few = [*TINY, "data.min_pairs=2", "train.batch_size=2", "train.steps=2"]
    assert train("photos", ["data.source=photos", *few], name="few").steps == 2
    with pytest.raises(DataError, match="at least 10 pairs; scenes has 4"):
        train("first-run", ["model.name=tiny", "data.train_pairs=4"])


def test_images_that_cannot_be_read_are_no_pairs(here: Path) -> None:
    folder = photos(here / "photos", 10)
    (folder / "000.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="Training needs at least 10 pairs"):
        train_on_photos("data.broken_share=0.5")


def test_images_that_the_data_holds_out_are_no_pairs(here: Path) -> None:
    write_photos(here / "photos", [*["train"] * 9, *["val"] * 20])
    with pytest.raises(DataError, match="has 9"):
        train_on_photos()
