"""`lapclip data check`: what it finds in data that has one of everything odd, and what it says of training."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lapclip.cli.data import summary
from lapclip.commands import choose_recipe
from lapclip.commands.data import check_data, outlook, settings_for
from lapclip.config import DataConfig
from lapclip.data.loading import load_data
from lapclip.data.packed_store import store_bytes
from lapclip.errors import DataError
from tests.conftest import counted_reads, lapclip, set_flags
from tests.data.check.made import encoded, odd_folder, odd_images, scene, write_csv
from tests.small_runs import photos

TINY = "model.name=tiny"
"""Steps of the model are timed, and here nothing hangs on which model that is."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return check_data(
        str(odd_folder(tmp_path_factory.mktemp("odd"))), "first-run", [TINY, "data.tokenizer=clip"]
    )


def finding(found: dict, kind: str) -> dict:
    (only,) = [each for each in found["findings"] if each["kind"] == kind]
    return only


def test_counts_are_those_of_the_data(found: dict) -> None:
    names = odd_images()
    assert (found["images"], found["captions"]) == (len(names), len(names) + 4)
    assert found["splits"] == {
        "train": {"images": len(names) - 4, "captions": len(names)},  # two cannot be read
        "val": {"images": 2, "captions": 2},
    }
    assert found["usable"] == {"images": len(names) - 2, "captions": len(names) + 2}
    assert found["broken_share_needed"] == 0.13


@pytest.mark.parametrize(
    ("kind", "example"),
    [
        ("unreadable", "words.jpg"),
        ("truncated", "early.jpg"),
        ("duplicate_images", "plain0.jpg = again.jpg"),
        ("near_duplicate_images", "plain1.jpg = halved.jpg"),
        ("image_in_two_splits", "plain0.jpg (train) = again.jpg (val)"),
        ("captions_cut", "very very"),
    ],
)
def test_each_kind_of_oddness_is_found_once_and_named(found: dict, kind: str, example: str) -> None:
    each = finding(found, kind)
    assert each["count"] == 1
    assert each["examples"][0].startswith(example)
    assert each["title"]
    assert each["advice"]


def test_images_that_are_smaller_than_the_model_sees_are_named(found: dict) -> None:
    assert "speck.png (4 x 4)" in finding(found, "small")["examples"]


def test_equal_captions_of_different_images_are_counted(found: dict) -> None:
    assert finding(found, "duplicate_captions")["count"] == 2
    assert finding(found, "duplicate_captions")["examples"] == ["a red bicycle (2 images)"]


def test_the_gravest_findings_come_first(found: dict) -> None:
    order = ["alarm", "warning", "note"]
    places = [order.index(each["severity"]) for each in found["findings"]]
    assert places == sorted(places)
    assert finding(found, "image_in_two_splits")["severity"] == "alarm"
    assert (
        finding(found, "unreadable")["severity"] == "alarm"
    )  # two of sixteen are more than data.broken_share


def test_needs_leave_out_what_cannot_be_read(found: dict) -> None:
    side = found["needs"]["image_size"]
    assert found["needs"]["store_bytes"] == store_bytes(
        found["images"] - 4, 2, side
    )  # two cannot be read, two are val


CATEGORY_COLORS = {"water": (30, 90, 160), "wood": (110, 70, 30), "sand": (220, 190, 130)}


@pytest.fixture
def category_data(tmp_path: Path) -> Path:
    """Images that show a category, with captions that say more, as generated demo data sets have.

    A JSON list of objects with image_id, caption, category and split lies beside `images/`.
    """
    draw = np.random.default_rng(0)
    gradient = np.linspace(0.7, 1, 64)[:, None, None]
    records = []
    (tmp_path / "images").mkdir()
    for number, (category, color) in enumerate(list(CATEGORY_COLORS.items()) * 12):
        pixels = gradient * np.array(color) + draw.normal(0, 5, (64, 64, 3))
        name = f"sample_{number:03}.jpg"
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(tmp_path / "images" / name)
        split = "val" if number >= 30 else "train"
        caption = f"A photo of {category}, style {number % 4}"
        record = {"image_id": name, "caption": caption, "category": category, "split": split}
        records.append(record)
    (tmp_path / "captions.json").write_text(json.dumps(records))
    return tmp_path


def test_images_that_show_a_category_alone_are_found(
    category_data: Path, empty_cache: Path
) -> None:
    found = check_data(str(category_data), "first-run", [TINY])
    assert found["how"] == (
        f'captions.json: JSON list; column "image_id" holds {found["images"]} file names: images; '
        'column "caption": captions; column "split": splits'
    )
    assert found["columns"] == [
        {
            "images": "image_id",
            "image_count": found["images"],
            "captions": ("caption",),
            "split": "split",
        }
    ]
    assert {split: counts["images"] for split, counts in found["splits"].items()} == {
        "train": 30,
        "val": 6,
    }
    held_out = finding(found, "image_in_two_splits")
    assert (held_out["count"], held_out["severity"]) == (3, "alarm")
    assert finding(found, "near_duplicate_images")["count"] == 33  # all but one of each category
    assert finding(found, "duplicate_captions")["count"] == 36


def test_clean_data_has_no_findings_and_a_ceiling_of_one(tmp_path: Path) -> None:
    images = {f"{seed}.jpg": encoded(scene(seed)) for seed in range(12)}
    rows = [
        (name, f"{'very ' * at}good", "val" if at in (3, 4) else "train")
        for at, name in enumerate(images)
    ]
    found = check_data(str(write_csv(tmp_path, images, rows)), "first-run", [TINY])
    assert found["findings"] == []
    assert found["ceilings"] == {"val": {"t2i_r1": 1.0, "i2t_r1": 1.0}}
    assert found["tokenizer"]["kind"] == "bpe"


def test_characters_that_training_never_shows_are_named(tmp_path: Path) -> None:
    images = {"a.jpg": encoded(scene(1)), "b.jpg": encoded(scene(2)), "c.jpg": encoded(scene(3))}
    rows = [("a.jpg", "a dog", "train"), ("b.jpg", "a god", "train"), ("c.jpg", "a dög", "val")]
    found = check_data(
        str(write_csv(tmp_path, images, rows)), "first-run", ["data.tokenizer=characters", TINY]
    )
    assert finding(found, "unknown_characters")["examples"] == ["ö (in 1 captions)"]


def test_copies_are_on_one_side_where_splits_are_drawn(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapclip.commands.data.towers_installed", lambda: False)
    images = {
        f"{seed}{which}.jpg": encoded(scene(seed), comment=which)
        for seed in range(20)
        for which in "ab"
    }
    rows = [(name, f"the thing {name[:-4]}", "") for name in images] + [
        ("0a.jpg", "", ""),
        ("gone.jpg", "x", ""),
    ]
    found = check_data(str(write_csv(tmp_path, images, rows)), "first-run", [TINY])
    assert finding(found, "duplicate_images")["count"] == 20
    assert not [each for each in found["findings"] if each["kind"] == "image_in_two_splits"]
    assert found["split_rule"] == "content"
    assert sorted(finding(found, "skipped_rows")["reasons"].values()) == [1, 1]
    data = load_data(DataConfig(source=str(tmp_path)), 16)
    assert {split: len(pairs) for split, pairs in data.splits.items()} == {
        split: counts["images"] for split, counts in found["splits"].items()
    }


@pytest.mark.parametrize("installed", [True, False])
def test_check_and_train_agree_on_the_recipe_for_few_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(choose_recipe, "towers_installed", lambda: installed)
    monkeypatch.setattr("lapclip.commands.data.towers_installed", lambda: installed)
    images = {f"{seed}.jpg": encoded(scene(seed)) for seed in range(6)}
    source = str(write_csv(tmp_path, images, [(name, f"thing {name[:-4]}", "") for name in images]))
    reads = counted_reads(monkeypatch)
    found = check_data(source, None, [])
    assert len(reads) == 1
    named = [f"data.source={json.dumps(source)}"]
    chosen = choose_recipe.settle_recipe("auto", named)
    assert found["train_recipe"] == chosen.recipe == "heads"
    assert found["recipe"] == ("heads" if installed else "photos")
    assert ("small-towers" in found["outlook"]) == (not installed)
    needs, lines, learnt = found["needs"], summary(found), found["splits"]["train"]["images"]
    assert needs["image_size"] == (288 if installed else 112)
    assert needs["store_bytes"] == store_bytes(learnt, 6 - learnt, needs["image_size"])
    assert found["tokenizer"]["kind"] == ("foreign" if installed else "characters")
    assert any(f"{found['recipe']}, for which" in line for line in lines)
    last = lines[-1]
    assert "train" in last
    assert "--recipe" not in last
    assert len(chosen.notes) == 1
    assert "--recipe photos" in chosen.notes[0]
    photos = choose_recipe.SettledRecipe("photos", [])
    assert choose_recipe.settle_recipe("photos", named) == photos
    changed = choose_recipe.settle_recipe("auto", [*named, "model.image_size=32"])
    changed.table.take()
    assert changed == photos


def settled(tmp_path: Path, images: int, *settings: str) -> choose_recipe.SettledRecipe:
    """The recipe for a table of so many training images, which are empty files: none is opened."""
    table = tmp_path / f"{images}.csv"
    lines = ["filepath,caption,split"]
    for at in range(images + 2):
        (tmp_path / f"{at}.jpg").touch()
        split = ("train", "val", "test")[max(0, at - images + 1)]
        lines.append(f"{at}.jpg,thing {at},{split}")
    table.write_text("\n".join(lines))
    return choose_recipe.settle_recipe("auto", [f"data.source={json.dumps(str(table))}", *settings])


@pytest.mark.parametrize("images", [12, 1_500])
def test_pretrained_networks_are_the_default_at_every_size(tmp_path: Path, images: int) -> None:
    assert settled(tmp_path, images).recipe == "heads"
    assert choose_recipe.MAX_IMAGES_FOR_HEADS > 6_000  # Flickr8k


def test_many_images_and_streams_train_from_scratch_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_recipe, "MAX_IMAGES_FOR_HEADS", 50)
    assert settled(tmp_path, 50).recipe == "heads"
    for found, reason in (
        (settled(tmp_path, 51), "51 images"),
        (settled(tmp_path, 20, "data.stream=always"), "streamed"),
    ):
        assert found.recipe == "photos"
        (note,) = found.notes
        assert reason in note
        assert "--recipe heads" in note


def test_settings_of_the_model_and_a_teacher_decide_for_themselves(tmp_path: Path) -> None:
    found = settled(tmp_path, 20, "model.image_layers=4")
    assert (found.recipe, found.notes) == ("photos", [])
    found = settled(tmp_path, 20, "train.teacher=runs/mine")
    assert (found.recipe, found.notes) == ("photos", [])
    assert settled(tmp_path, 20, "train.start=runs/mine").recipe == "heads"
    assert settled(tmp_path, 2_000, "train.start=runs/mine").recipe == "lora"


def test_training_stops_in_two_lines_where_the_pretrained_networks_are_missing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos", 12)
    monkeypatch.setattr(choose_recipe, "towers_installed", lambda: False)
    for flags in ([], ["--background"]):
        done = lapclip("train", "photos", *flags)
        assert done.returncode == 2
        install, without = done.stderr.strip().splitlines()
        assert "small-towers" in install
        assert "--recipe photos" in without
    assert not (here / "runs").exists()
    assert lapclip("data", "check", "photos").returncode == 0


def test_the_outlook_is_honest_about_few_images() -> None:
    assert "7.8%" in outlook(400, "heads")
    assert "--recipe" not in outlook(400, "heads")
    assert "--recipe heads" in outlook(6000)
    assert "R@10 of 0.31" in outlook(6000)
    assert "DataComp" in outlook(5_000_000)
    assert store_bytes(10, 3, 112) == 3 * (10 * 128 * 128 + 3 * 112 * 112)


def test_the_built_in_scenes_can_be_checked() -> None:
    found = check_data("scenes", None, ["data.train_pairs=64", TINY])
    assert found["splits"]["train"]["images"] == 64
    assert found["tokenizer"]["kind"] == "bpe"
    assert "made for learning from nothing" in found["outlook"]


@pytest.mark.slow
@pytest.mark.real_data
def test_flickr8k_has_the_copy_that_is_known(flickr8k: Path) -> None:
    found = check_data(str(flickr8k), None, [])
    assert (found["images"], found["captions"]) == (7000, 35000)
    assert {split: counts["images"] for split, counts in found["splits"].items()} == {
        "train": 6000,
        "val": 1000,
    }
    assert finding(found, "duplicate_images")["examples"] == [
        "images/2851198725_37b6027625.jpg = images/3050606344_af711c726c.jpg"
    ]
    # Photos of one scene a moment apart are at the edge of what counts as alike: some are found, and few that are not.
    assert 1 <= finding(found, "near_duplicate_images")["count"] <= 5


def test_check_and_train_agree_on_what_is_too_much(tmp_path: Path, empty_cache: Path) -> None:
    images = {f"{seed}.jpg": encoded(scene(seed)) for seed in range(12)}
    rows = [(name, f"thing {name[:-4]}", "val" if name == "1.jpg" else "train") for name in images]
    source = str(write_csv(tmp_path, images, [*rows, ("gone.jpg", "nothing", "train")]))
    for share, severity in ((0.05, "alarm"), (0.1, "warning")):
        found = check_data(source, "first-run", [TINY, f"data.broken_share={share}"])
        assert finding(found, "skipped_rows")["severity"] == severity
        refused = (
            pytest.raises(DataError, match="1 of 13 rows") if severity == "alarm" else nullcontext()
        )
        with refused:
            load_data(DataConfig(source=source, broken_share=share), 16)


def test_towers_that_a_setting_names_are_not_fetched_to_estimate(tmp_path: Path) -> None:
    config, recipe = settings_for(str(tmp_path), None, ["model.image_from=timm:resnet18"])
    assert (config.model.image_from, recipe) == ("", "photos")


def test_a_note_about_copies_names_few_of_them(tmp_path: Path) -> None:
    """A JSON list beside images/ in which eight drawings are repeated and lie in both splits."""
    (tmp_path / "images").mkdir()
    rows = []
    for at in range(120):
        name, split = f"img_{at:03}", "val" if at % 10 == 0 else "train"
        (tmp_path / "images" / f"{name}.png").write_bytes(encoded(scene(at % 8), comment=name))
        rows.append(
            {"image_id": name, "caption": f"sample {at}", "category": f"c{at % 8}", "split": split}
        )
    (tmp_path / "captions.json").write_text(json.dumps(rows))
    notes = load_data(DataConfig(source=str(tmp_path)), 32).notes
    (copies,) = [note for note in notes if "in two splits" in note]
    assert 0 < copies.count(" = ") <= 3
    assert copies.count(".") <= 2 * 3
    assert all(len(note) < 300 for note in notes)


def test_data_without_a_usable_image_suggests_no_training(tmp_path: Path) -> None:
    images = {f"{number}.jpg": b"this is not an image" for number in range(3)}
    rows = [(name, name, "train") for name in images]
    found = check_data(str(write_csv(tmp_path, images, rows)), "first-run", [TINY])
    names = finding(found, "file_name_captions")
    assert (names["severity"], names["count"], names["examples"][0]) == ("warning", 3, "0.jpg")
    assert found["outlook"] == "No image can be used for training."
    assert summary(found)[-1] == (
        "Next: mend the data or add images to train on, then check it again"
    )


def test_captions_that_are_numbers_are_found_and_warned_of(here: Path) -> None:
    images = {f"{number:02}.png": encoded(scene(number), "PNG") for number in range(24)}
    (here / "photos").mkdir()
    rows = [
        (name, str(number), "val" if number > 19 else "train") for number, name in enumerate(images)
    ]
    write_csv(here / "photos", images, rows)
    settings = [TINY, "train.cheap_size=16"]
    checked = lapclip("data", "check", "photos", "--json", *set_flags(*settings))
    assert checked.returncode == 0, checked.stderr
    found = finding(json.loads(checked.stdout), "number_captions")
    assert (found["severity"], found["count"]) == ("warning", 24)
    settings += ["train.steps=2", "train.batch_size=4", "train.device=cpu", "train.threads=1"]
    done = lapclip("train", "photos", "--recipe", "photos", *set_flags(*settings))
    assert done.returncode == 0, done.stderr
    assert "24 of 24 captions are numbers, such as '0'" in done.stderr
    assert "--set data.caption_column=NAME" in done.stderr
