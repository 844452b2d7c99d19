"""From a command to an account: which model, which images, what is kept."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lapclip.cli.eval import _tables
from lapclip.commands.evaluate import evaluate, save_evaluation, score
from lapclip.commands.evaluation_data import (
    EvaluationRequest,
    choose_split,
    choose_templates,
    encode,
)
from lapclip.commands.export import open_pairs
from lapclip.config import DataConfig
from lapclip.data.dataset import DataSet, Pairs, join_splits, save_seen
from lapclip.data.loading import load_data
from lapclip.data.pixels import View
from lapclip.embedder import load
from lapclip.errors import ConfigError, DataError, LapclipError, RunError
from lapclip.evaluation import note_on_chance
from lapclip.evaluation.calibration import calibration_of
from lapclip.evaluation.hubness import read_bank
from lapclip.evaluation.retrieval import retrieval
from lapclip.prompts import TEMPLATES, class_embeddings
from lapclip.which_model import which_model

from ..small_runs import train_small, write_classes, write_photos


@pytest.fixture
def mine(trained: Path, here: Path) -> Path:
    """A copy of the run in an empty folder."""
    shutil.copytree(trained, here / "runs" / "mine")
    return here / "runs" / "mine"


def test_a_run_is_scored_on_the_split_that_chose_nothing_and_the_account_is_kept(
    mine: Path,
) -> None:
    result = evaluate(EvaluationRequest(device="cpu"))
    assert (result["split"], result["why_split"]) == ("test", "it chose nothing")
    assert result["evaluation"]["candidates"] == 240
    assert 0 <= result["linear_baseline"] < 0.5
    assert result["negatives"]["negatives"] == 11
    short = result["short_questions"]
    assert short["questions"] >= 30
    assert 0 < short["chance"] < short["map"] < 1
    assert short["map_low"] <= short["map"] <= short["map_high"]
    assert short["phrases"] is None  # fewer than 30
    folder = mine / "evaluation" / "test"
    kept = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert kept.pop("written_by")
    assert kept == {name: value for name, value in result.items() if name != "files"}
    shown = {path.stem for path in (folder / "pictures").iterdir()}
    assert {
        f"evaluation-{answer['picture']}"
        for example in result["examples"]
        for answer in example["top"]
    } <= shown
    assert {f"evaluation-{pair['own']}" for pair in result["confused"]} <= shown
    assert result["files"][0] == str(Path("runs/mine/evaluation/test/evaluation.html"))
    page = (folder / "evaluation.md").read_text(encoding="utf-8")
    assert "Hard negatives" in page
    assert f"{short['questions']} words" in page


def test_what_scores_are_worth_is_kept_with_the_run_for_search(mine: Path) -> None:
    bank = read_bank(mine / "questions.json")
    assert bank is not None
    assert len(bank.captions) > 100
    (mine / "questions.json").unlink()
    result = evaluate(EvaluationRequest(device="cpu"))
    assert read_bank(mine / "questions.json") == bank
    assert result["hubness"]["bank"] == len(bank.captions)
    assert result["hubness"]["questions"] == result["evaluation"]["captions"]
    assert result["hubness"]["t2i_r1"] == pytest.approx(result["evaluation"]["t2i_r1"], abs=0.01)
    model = which_model("mine")
    kept = calibration_of(model, load(mine))
    assert kept is not None
    assert kept.recall_after == result["hubness"]["t2i_r1_with"]
    assert "hubness correction" in (mine / "evaluation" / "test" / "evaluation.md").read_text(
        encoding="utf-8"
    )


def test_images_that_it_learnt_from_calibrate_nothing(mine: Path) -> None:
    assert "hubness" not in evaluate(EvaluationRequest(device="cpu", split="train"))
    assert not (mine / "calibration.safetensors").exists()


def test_another_split_replaces_nothing_of_the_first(mine: Path) -> None:
    evaluate(EvaluationRequest(device="cpu", split="val"))
    evaluate(EvaluationRequest("mine", device="cpu", split="all"))
    assert {path.name for path in (mine / "evaluation").iterdir()} == {"val", "all"}


@pytest.mark.parametrize(
    ("splits", "split", "why"),
    [
        ([""] * 8, "all", "it has no splits of its own"),
        (["train"] * 4 + ["val"] * 4, "val", "there is no test split"),
        (["train", "val"] * 2 + ["test"] * 4, "test", "it chose nothing"),
        (["train"] * 8, "all", "it has no test or val split"),
    ],
)
def test_other_data_is_scored_on_what_was_kept_back_or_whole(
    mine: Path, splits: list[str], split: str, why: str
) -> None:
    photos = write_photos(Path("photos"), splits)
    result = evaluate(EvaluationRequest("mine", str(photos), device="cpu"))
    assert (result["split"], result["why_split"]) == (split, why)
    assert result["evaluation"]["candidates"] == (8 if split == "all" else 4)
    assert result["evaluation"]["captions"] == 2 * result["evaluation"]["candidates"]
    assert "linear_baseline" not in result
    (folder,) = (mine / "evaluation").iterdir()
    assert re.fullmatch(f"photos-[0-9a-f]{{6}}-{split}", folder.name)
    assert (folder / "evaluation.html").exists()


def test_a_model_in_a_folder_of_its_own_needs_data_and_keeps_nothing_unless_asked(
    mine: Path, tmp_path: Path
) -> None:
    photos = write_photos(Path("photos"), [""] * 6)
    shutil.move(mine / "model", "bare")
    with pytest.raises(DataError, match="name the data"):
        evaluate(EvaluationRequest("bare", device="cpu"))
    result = evaluate(EvaluationRequest("bare", str(photos), device="cpu"))
    assert result["files"] == []
    assert "in_batch" not in result["evaluation"]
    kept = evaluate(EvaluationRequest("bare", str(photos), device="cpu", out=Path("shared")))
    assert Path("shared/evaluation.html").exists()
    assert kept["evaluation"] == result["evaluation"]


def test_the_figures_are_those_of_the_embeddings(mine: Path) -> None:
    photos = write_photos(Path("photos"), [""] * 6)
    whole = evaluate(EvaluationRequest("mine", str(photos), device="cpu"))
    result = whole["evaluation"]
    assert whole["short_questions"] is None
    assert "no short questions" in " ".join(whole["notes"])
    model = load("runs/mine")
    images = model.encode_image([photos / f"{at}.png" for at in range(6)])
    texts = model.encode_text(
        [f"{words} number {at}" for at in range(6) for words in ("a thing", "the thing")]
    )
    plain = retrieval(images, texts, np.repeat(np.arange(6), 2))
    assert {name: result[name] for name in plain if name != "similarities"} == {
        name: value for name, value in plain.items() if name != "similarities"
    }


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (EvaluationRequest("mine", split="tset"), r"no split tset. Did you mean test\?"),
        (EvaluationRequest("mine", "nowhere"), "There is no nowhere"),
        (EvaluationRequest("photos"), "photos holds no model"),
        (EvaluationRequest("yours"), "No run called yours"),
        (EvaluationRequest("mine", settings=["data.prompts=a photo"]), "has no {} for the class"),
        (EvaluationRequest("mine", device="gpu"), "--device gpu is not here"),
        (EvaluationRequest("mine", "photos", settings=["data.seeed=1"]), "Did you mean data.seed"),
    ],
)
def test_what_cannot_be_is_named(mine: Path, wanted: EvaluationRequest, words: str) -> None:
    write_photos(Path("photos"), [""] * 2)
    with pytest.raises(LapclipError, match=words):
        evaluate(wanted)
    assert not (mine / "evaluation").exists()


def test_a_run_without_a_model_says_so(mine: Path) -> None:
    shutil.rmtree(mine / "model")
    with pytest.raises(RunError, match="no trained model"):
        evaluate(EvaluationRequest("mine"))


def test_data_that_changed_since_is_scored_and_said(mine: Path) -> None:
    settings = mine / "run.toml"
    settings.write_text(
        settings.read_text().replace("data_fingerprint = ", "data_fingerprint = 'x' # ")
    )
    assert (
        "not what the run began with"
        in evaluate(EvaluationRequest("mine", device="cpu"))["notes"][-1]
    )


def classes_of(count: int) -> DataSet:
    """Images of three classes, in two splits."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (count, 64, 64, 3), dtype=np.uint8)
    labels = np.arange(count) % 3
    captions = [(f"a photo of a {label}.",) for label in labels]
    half = count // 2
    splits = {
        name: Pairs(pixels[rows], captions[rows], labels=labels[rows])
        for name, rows in (("train", slice(0, half)), ("val", slice(half, count)))
    }
    return DataSet(splits, "made", classes=["red cat", "blue_dog", "owl"])


def test_class_folders_are_scored_from_the_command(mine: Path) -> None:
    write_classes(Path("things"), 4)
    result = evaluate(EvaluationRequest("mine", "things", device="cpu"))
    assert (result["split"], result["why_split"]) == ("all", "classes: all images count")
    assert result["zeroshot"]["classes"] == 2
    assert any(
        f"and {len(TEMPLATES) - 3} more" in note for note in result["notes"]
    )  # what is said is what is used
    assert {row["name"] for row in result["zeroshot"]["per_class"]} == {"owl", "red cat"}
    files = [Path("things") / name / f"{at}.png" for name in ("owl", "red_cat") for at in range(4)]
    images = load("runs/mine").encode_image(files)
    texts = class_embeddings(load("runs/mine").encode_text, ["owl", "red cat"], TEMPLATES)
    right = (images @ texts.T).argmax(axis=1) == np.repeat([0, 1], 4)
    assert result["zeroshot"]["top1"] == pytest.approx(right.mean())


def test_classes_are_told_apart_with_templates(mine: Path) -> None:
    data = classes_of(20)
    pairs = join_splits(list(data.splits.values()))
    split, why = choose_split(["train", "val"], None, learnt_from=False, classes=True)
    assert (split, why) == ("all", "classes: all images count")
    model, told = load("runs/mine"), []
    vectors = encode(
        model,
        pairs,
        data.classes,
        ["a {}.", "the {}."],
        lambda done, total: told.append((done, total)),
    )
    found = score(model, vectors, pairs, data.classes, None)
    assert told[-1] == (20, 20)
    centres = [
        model.encode_text([f"a {name}.", f"the {name}."]).mean(axis=0)
        for name in ("red cat", "blue dog", "owl")
    ]
    pixels = np.concatenate([np.asarray(data.splits[name].pixels) for name in ("train", "val")])
    guesses = (
        model.encode_pixels(pixels) @ np.stack([row / np.linalg.norm(row) for row in centres]).T
    ).argmax(axis=1)
    assert found["zeroshot"]["top1"] == pytest.approx(np.mean(guesses == np.arange(20) % 3))
    assert found["zeroshot"]["classes"] == 3
    assert choose_split(["train", "val"], "val", learnt_from=False, classes=True)[0] == "val"
    result = {
        "run": "runs/mine",
        "data": "things",
        "split": "all",
        "why_split": why,
        "notes": [],
        "templates": ["a {}.", "the {}."],
        **found,
    }
    files = save_evaluation(result, pairs, Path("kept"), Path("kept"))
    text = files[1].read_text(encoding="utf-8")
    assert "Confusion matrix" in text
    shown = {path.stem for path in Path("kept/pictures").iterdir()}
    assert shown == {f"evaluation-{entry['picture']}" for entry in found["mistaken"]}


def test_templates_are_the_runs_for_its_own_classes_then_ours_unless_others_are_set() -> None:
    trained, usual = DataConfig(prompts="a drawing of {}."), DataConfig()
    assert choose_templates(trained, own=True) == ["a drawing of {}."]
    assert choose_templates(usual, own=True) == ["a photo of a {}."]
    assert choose_templates(usual, own=False) == list(TEMPLATES)
    assert choose_templates(trained, own=False) == ["a drawing of {}."]  # given with --set


def test_the_runs_own_val_split_is_known_to_have_chosen_the_checkpoint() -> None:
    why = choose_split(["train", "val"], None, learnt_from=True)[1]
    assert why == "there is no test split; val chose the checkpoint"


def test_the_runs_own_classes_are_scored_on_what_was_held_out() -> None:
    assert choose_split(["train", "val", "test"], None, learnt_from=True, classes=True)[0] == "test"
    assert choose_split(["train", "val"], None, learnt_from=True, classes=True)[0] == "val"


def test_class_folders_that_the_run_learnt_from_are_not_scored_whole(mine: Path) -> None:
    count = learnt_from(mine, write_classes(Path("things"), 20))
    found = evaluate(EvaluationRequest("mine", device="cpu"))
    assert (found["split"], found["trained_on"], found["templates"]) == (
        "test",
        0,
        ["a photo of a {}."],
    )
    assert 0 < found["zeroshot"]["pictures"] < 40 - count
    assert evaluate(EvaluationRequest("mine", device="cpu", split="all"))["trained_on"] == count


def learnt_from(run: Path, source: Path) -> int:
    """As if the run had learnt from the training split of other data; how many images that are."""
    settings = run / "run.toml"
    told = f"source = {json.dumps(str(source.absolute()))}"
    text = settings.read_text(encoding="utf-8").replace('source = "scenes"', told)
    settings.write_text(
        text.replace('split_rule = "name"', 'split_rule = "content"'), encoding="utf-8"
    )
    train = load_data(DataConfig(source=str(source)), 64).train
    save_seen(train.identities, run / "seen.npy")
    return len(train)


def test_images_that_the_run_learnt_from_are_counted_and_said_first(mine: Path) -> None:
    photos = write_photos(Path("photos"), [""] * 40)
    count = learnt_from(mine, photos)
    own = evaluate(EvaluationRequest("mine", device="cpu"))
    assert (own["split"], own["trained_on"]) == ("test", 0)
    assert not any("trained on" in note for note in own["notes"])
    whole = evaluate(EvaluationRequest("mine", device="cpu", split="all"))
    assert whole["trained_on"] == count
    assert (
        whole["notes"][0]
        == f"The model was trained on {count} of these 40 images: this is no test of it."
    )
    # The same images by another name are no other data.
    table = evaluate(EvaluationRequest("mine", "photos/captions.csv", device="cpu"))
    assert (table["split"], table["trained_on"]) == ("all", count)
    assert table["notes"][0] == whole["notes"][0]
    page = (Path(table["files"][1])).read_text(encoding="utf-8")
    assert "this is no test of it" in page
    lines = _tables(table)
    assert lines[1].startswith("[yellow]The model was trained on")
    assert lines[1 + len(table["notes"])].startswith("[bold]pairs: 40 images")
    assert any(line.startswith("[bold]held-out test pairs") for line in _tables(own))
    settings = mine / "run.toml"
    settings.write_text(
        settings.read_text(encoding="utf-8").replace("data_fingerprint", "other"), encoding="utf-8"
    )
    assert evaluate(EvaluationRequest("mine", device="cpu"))["split"] == "test"
    (mine / "seen.npy").unlink()
    assert evaluate(EvaluationRequest("mine", device="cpu", split="train"))["trained_on"] == count


def test_images_that_were_saved_again_since_are_no_test(mine: Path) -> None:
    """They have other bytes, so that splits are drawn anew and no image is recognised."""
    photos = write_photos(Path("photos"), [""] * 40)
    learnt_from(mine, photos)
    assert not evaluate(EvaluationRequest("mine", device="cpu"))["data_changed"]
    for path in photos.rglob("*.png"):
        with Image.open(path) as image:
            image.resize((60, 60)).save(path)
    found = evaluate(EvaluationRequest("mine", device="cpu"))
    assert (found["data_changed"], found["trained_on"]) == (True, None)
    assert "no test" in found["notes"][0]
    assert not any("held-out" in line for line in _tables(found))
    assert open_pairs(which_model("mine"), View(64), None).notes == (found["notes"][0],)


def test_drawn_images_of_training_are_counted(mine: Path) -> None:
    assert evaluate(EvaluationRequest("mine", device="cpu"))["trained_on"] == 0
    assert evaluate(EvaluationRequest("mine", device="cpu", split="train"))["trained_on"] == 64


@pytest.mark.parametrize(
    "setting", ["data.seed=7", "data.split_column=x", "data.train_pairs=32", "data.source=photos"]
)
def test_settings_that_would_mix_training_images_in_are_refused(mine: Path, setting: str) -> None:
    write_photos(Path("photos"), [""] * 6)
    with pytest.raises(ConfigError, match=r"stays as it was|is not a setting"):
        evaluate(EvaluationRequest("mine", device="cpu", settings=[setting]))
    if "source" not in setting:
        evaluate(
            EvaluationRequest(
                "mine", "photos", device="cpu", settings=[setting.replace("=x", '=""')]
            )
        )


def test_other_data_never_replaces_the_runs_own_account(mine: Path) -> None:
    write_photos(Path("val"), ["train"] * 3 + ["val"] * 3)
    shutil.copytree("val", "more/val")
    evaluate(EvaluationRequest("mine", device="cpu", split="val"))
    for source in ("val/", "val", "more/val/"):
        evaluate(EvaluationRequest("mine", source, device="cpu"))
    names = sorted(path.name for path in (mine / "evaluation").iterdir())
    assert len(names) == 3
    kept = json.loads((mine / "evaluation/val/evaluation.json").read_text(encoding="utf-8"))
    assert kept["data"] == "scenes"


def test_images_in_the_folder_of_the_user_stay(mine: Path) -> None:
    photos = write_photos(Path("photos"), [""] * 6)
    theirs = [
        Path("album/1.jpg"),
        Path("album/pictures/1.jpg"),
        Path("album/pictures/evaluation-99.jpg"),
    ]
    theirs[1].parent.mkdir(parents=True)
    for path in theirs:
        path.write_bytes(b"mine")
    evaluate(EvaluationRequest("mine", str(photos), device="cpu", out=Path("album")))
    assert [path.read_bytes() for path in theirs] == [b"mine"] * 3
    assert sorted(Path("album/pictures").iterdir()) == theirs[1:]
    assert "<img" in Path("album/evaluation.html").read_text(encoding="utf-8")


def test_embeddings_that_are_not_numbers_are_refused() -> None:
    pairs = Pairs(np.zeros((2, 8, 8, 3), dtype=np.uint8), [("a",), ("b",)], labels=np.array([0, 1]))
    broken = np.array([[1.0, 0.0], [np.nan, 0.0]])
    model: Any = SimpleNamespace(
        encode_pairs=lambda pairs, progress: (broken, np.eye(2), np.arange(2)),
        encode_pixels=lambda pixels, progress: broken,
        encode_text=lambda texts: np.eye(2),
    )
    for classes in ([], ["a", "b"]):
        with pytest.raises(RunError, match="not numbers"):
            encode(model, pairs, classes, ["{}"])


def test_joined_splits_read_like_one_array() -> None:
    data = classes_of(11)
    whole = join_splits(list(data.splits.values()))
    parts = np.concatenate([np.asarray(part.pixels) for part in data.splits.values()])
    assert whole.pixels.shape == (11, 64, 64, 3)
    assert whole.labels is not None
    assert whole.labels.tolist() == [at % 3 for at in range(11)]
    for rows in (3, -1, slice(2, 9), slice(None), np.array([10, 0, 5, 5])):
        np.testing.assert_array_equal(whole.pixels[rows], parts[rows])


def test_images_without_captions_are_refused(mine: Path) -> None:
    empty = Pairs(np.zeros((2, 64, 64, 3), dtype=np.uint8), [(), ()])
    with pytest.raises(DataError, match="None of the images has a caption"):
        encode(load("runs/mine"), empty, [], [])


def test_a_model_at_or_below_chance_is_told_with_the_interval() -> None:
    ways = {f"{way}_r10": value for way, value in (("t2i", 0.05), ("i2t", 0.04))}
    pairs = {"candidates": 240, **ways, "chances": dict.fromkeys(ways, 10 / 240)}
    at = {**pairs, "intervals": {"t2i_r10": [0.02, 0.08], "i2t_r10": [0.01, 0.03]}}
    (note,) = note_on_chance(at)
    assert "text to image R@10 5.0% (2.0% to 8.0%) reaches down to chance, 4.2%" in note
    assert "image to text R@10 4.0% (1.0% to 3.0%) is below chance" in note
    assert note_on_chance({**at, "intervals": {**at["intervals"], "t2i_r10": [0.042, 0.08]}}) == []
    classes = {"top1": 0.07, "chance": {"top1": 0.1}, "intervals": {"top1": [0.04, 0.11]}}
    assert "top-1 7.0% (4.0% to 11.0%) reaches down to chance, 10.0%" in note_on_chance(classes)[0]
    above = {**classes, "top1": 0.15, "intervals": {"top1": [0.11, 0.2]}}
    assert note_on_chance(above) == []
    assert note_on_chance({**above, "largest_class": 0.1}) == []
    for share, how in ((0.12, "reaches down to"), (0.8, "is below")):
        (note,) = note_on_chance({**above, "largest_class": share})
        assert f"top-1 15.0% (11.0% to 20.0%) {how}" in note
        assert f"{share:.1%}" in note


def test_a_run_measures_at_its_end_what_its_scores_are_worth(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On val, which chose the model; test chooses nothing, and an evaluation on other images does not replace it."""
    monkeypatch.setattr("lapclip.training.final_scores.MIN_CALIBRATION_STEPS", 1)
    train_small(name="mine")
    kept = calibration_of(which_model("mine"), load("runs/mine"))
    assert kept is not None
    on_val = evaluate(EvaluationRequest("mine", split="val", device="cpu"))
    assert kept.recall_after == on_val["hubness"]["t2i_r1_with"]
    photos = write_photos(Path("photos"), [""] * 24)
    on_test = evaluate(EvaluationRequest("mine", split="test", device="cpu"))
    elsewhere = evaluate(EvaluationRequest("mine", str(photos), device="cpu"))
    assert on_test["hubness"]["questions"] > 0
    assert "hubness" not in elsewhere
    again = calibration_of(which_model("mine"), load("runs/mine"))
    assert again is not None
    assert replace(again, bank=kept.bank) == kept
