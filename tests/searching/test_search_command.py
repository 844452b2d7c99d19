from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import datetime
from pathlib import Path

import pytest
from PIL import Image

from lapclip.cli.search import _bar
from lapclip.suggest import command
from tests.conftest import lapclip
from tests.searching.made import draw, draw_many


def searched(*arguments: str) -> dict:
    done = lapclip("search", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_json_contract(trained: Path, photos: Path) -> None:
    draw_many(photos, 12)
    (photos / "bad.jpg").write_bytes(b"no image")
    found = searched(str(photos), "a red cat", "--model", str(trained), "--limit", "5")
    assert found["indexed"] == found["added"] == 12
    assert len(found["results"]) == 5
    scores = [result["score"] for result in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(Path(result["path"]).is_file() for result in found["results"])
    assert found["seconds"] >= found["query_seconds"] > 0
    assert found["unreadable"] == [
        {"path": "bad.jpg", "reason": "it is not an image of a known form"}
    ]
    again = searched(str(photos), "a red cat", "--model", str(trained), "--limit", "5")
    assert again["results"] == found["results"]
    assert again["added"] == 0


def test_a_bar_beside_each_result_and_no_word_on_whether_it_fits(
    trained: Path, photos: Path
) -> None:
    draw_many(photos, 12)
    arguments = ("search", str(photos), "a red cat", "--model", str(trained), "--limit", "12")
    done = lapclip(*arguments)
    rows = done.stdout.splitlines()[:12]
    assert rows[0].startswith("████████  ")
    assert rows[-1].startswith("░░░░░░░░  ")
    filled = [row[:8].count("█") for row in rows]
    assert filled == sorted(filled, reverse=True)
    text = " ".join(done.stdout.split())
    assert (
        text.count("Results are ranked by similarity; nothing here shows whether any of them fits.")
        == 1
    )
    assert text.count("Bars compare these images only") == 1
    answer = json.loads(lapclip(*arguments, "--json").stdout)
    assert answer["results"][0].keys() == {"path", "score", "number"}
    assert not {"verdict", "fit"} & answer.keys()


@pytest.mark.parametrize(
    ("encoding", "bar"), [("utf-8", "████░░░░"), ("cp1252", "####----"), ("ascii", "####----")]
)
def test_bars_are_made_of_characters_that_the_output_has(encoding: str, bar: str) -> None:
    assert _bar(0.5, encoding) == bar


def test_an_image_is_a_question_too(trained: Path, photos: Path) -> None:
    made = draw_many(photos, 6)
    for arguments in ([str(made[3])], ["--like", str(made[3])]):
        found = searched(str(photos), *arguments, "--model", str(trained), "--limit", "2")
        assert found["results"][0]["path"] == str(made[3])
        assert found["results"][0]["score"] == pytest.approx(1, abs=2e-3)


def test_since_and_exclude(trained: Path, photos: Path) -> None:
    old, new, cut = (
        draw(photos / "old.png", 1),
        draw(photos / "new.png", 2),
        draw(photos / "screenshots" / "a.png", 3),
    )
    for path, year in ((old, 2020), (new, 2024), (cut, 2020)):
        changed = datetime(year, 6, 1).timestamp()
        os.utime(path, (changed, changed))
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9003] = "2025:02:03 04:05:06"
    taken = photos / "taken.jpg"
    Image.open(old).convert("RGB").save(taken, exif=exif)
    os.utime(taken, (1, 1))  # the camera's date counts, not the file's

    def found(*arguments: str) -> set[str]:
        return {
            Path(one["path"]).name
            for one in searched(str(photos), "x", *arguments, "--model", str(trained))["results"]
        }

    assert found() == {"old.png", "new.png", "a.png", "taken.jpg"}
    assert found("--since", "2024-05-01") == {"new.png", "taken.jpg"}
    assert found("--since", "2025") == {"taken.jpg"}
    assert found("--exclude", "screenshots") == {"old.png", "new.png", "taken.jpg"}
    assert found("--exclude", "screenshots/*", "--exclude", "*.jpg") == {"old.png", "new.png"}


def test_a_minus_changes_the_order_towards_what_is_wanted(trained: Path, photos: Path) -> None:
    from lapclip.searching.library import open_library

    draw_many(photos, 30)
    library = open_library(photos, str(trained), device="cpu")
    plain = {hit.number: hit.score for hit in library.find("red", 99)}
    other = {hit.number: hit.score for hit in library.find("blue", 99)}
    minus = [hit.number for hit in library.find("red -blue", 99)]
    assert set(minus) == set(plain)
    assert minus != list(plain)
    first, last = minus[:10], minus[-10:]
    gain = {number: plain[number] - other[number] for number in plain}
    assert sum(gain[number] for number in first) > sum(gain[number] for number in last)


def test_pages_of_answers_join_and_images_like_one_leave_it_out(
    trained: Path, photos: Path
) -> None:
    from lapclip.searching.library import open_library

    draw_many(photos, 11)
    library = open_library(photos, str(trained), device="cpu")
    every = library.find("a cat", 99)
    assert [hit for offset in (0, 4, 8) for hit in library.find("a cat", 4, offset)] == every
    like = library.like(every[0].number, 99)
    assert len(like) == 10
    assert every[0].number not in {hit.number for hit in like}
    assert library.like(10**6) == []
    entry = library.entry(every[0].number)
    assert entry is not None
    assert (entry.width, entry.height, entry.bytes) == (40, 40, every[0].path.stat().st_size)
    assert library.entry(10**6) is None


def test_a_model_that_saw_scenes_says_so(trained: Path, photos: Path) -> None:
    draw_many(photos, 2)
    done = lapclip("search", str(photos), "a dog", "--model", str(trained))
    assert done.returncode == 0
    said = " ".join(done.stdout.split())
    assert "mine was trained on 64 images of lapclip's own drawn scenes and on no photos" in said
    assert "lapclip train PHOTOS_WITH_CAPTIONS" in said
    assert "a caption finds its own first in" in said
    elsewhere = photos.parent / "elsewhere"
    shutil.copytree(trained / "model", elsewhere)
    assert (
        "comes from elsewhere" in searched(str(photos), "x", "--model", str(elsewhere))["said"][0]
    )


def test_without_an_index_a_run_that_learnt_from_images_is_taken_and_then_the_one_that_made_it(
    trained: Path, here: Path
) -> None:
    draw_many(here / "photos", 2)
    none = lapclip("search", "photos", "x")
    assert none.returncode == 2
    assert "There is no trained model" in none.stderr
    shutil.copytree(trained, here / "runs" / "drawn")
    first = searched("photos", "x")
    assert first["model"] == str(Path("runs") / "drawn")
    assert "none learned from images" in first["why_model"]
    shutil.copytree(trained, here / "runs" / "pictures")
    settings = here / "runs" / "pictures" / "run.toml"
    text = settings.read_text(encoding="utf-8")
    assert 'source = "scenes"' in text
    settings.write_text(text.replace('source = "scenes"', 'source = "my-photos"'), encoding="utf-8")
    os.utime(settings, (1, 1))  # older than the other
    draw_many(here / "more", 2)
    found = searched("more", "x")
    assert found["model"] == str(Path("runs") / "pictures")
    assert found["why_model"] == "the newest finished run that learned from images"
    assert "trained on 64 images of my-photos" in found["said"][0]
    again = searched("photos", "x")
    assert (again["model"], again["why_model"]) == (
        str(Path("runs") / "drawn"),
        "it made the index of this folder",
    )
    assert again["added"] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not allow such names")
def test_names_are_text_in_the_terminal(trained: Path, photos: Path) -> None:
    draw(photos / "plain.png", 1).rename(photos / "a\n[bold]b\x1b[31m.png")
    (photos / "[red]c\n.jpg").write_bytes(b"no image")
    done = lapclip("search", str(photos), "x", "--model", str(trained))
    assert done.returncode == 0, done.stderr
    assert r"a\n[bold]b\x1b[31m.png" in done.stdout
    assert r"[red]c\n.jpg: it is not an image" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_search_ends_with_the_next_one_by_the_same_model(trained: Path, photos: Path) -> None:
    draw_many(photos, 3)
    done = lapclip("search", str(photos), "--model", str(trained))
    assert done.returncode == 0
    assert "3 images indexed (3 new or changed)" in done.stdout
    asked = command("search", photos, "a dog on a beach", "--model", trained)
    assert done.stdout.strip().endswith(asked.removeprefix("lapclip "))
    done = lapclip("search", str(photos), "two", "--model", str(trained))
    assert done.stdout.strip().endswith(command("--model", trained).removeprefix("lapclip "))
    assert "--like" in done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none"], "does not exist"),
        (["photos", ""], "nothing to look for"),
        (["photos", "x", "--since", "soon"], "no date and no age"),
        (["photos", "x", "--since", "9" * 400 + "d"], "no date and no age"),
        (["photos", "x", "--limit", "0"], "shows nothing"),
        (["photos", "--like", "none.jpg"], "There is no image none.jpg"),
        (["photos", "x", "--like", "photos/000.png"], "not both"),
        (["photos/000.png", "x"], "is not a folder"),
        (["empty", "x"], "There is no image in"),
        (["a dog", "photos/"], "search photos/ 'a dog'"),
        (["photos", "x", "--forget"], "--forget"),
        (["no\nfolder"], r"no\nfolder"),
        (["photos", "x", "--device", "cuda:7"], "--device"),
    ],
)
def test_mistakes_are_told_in_a_line_or_two(
    trained: Path, here: Path, arguments: list[str], said: str
) -> None:
    draw_many(here / "photos", 1)
    (here / "empty").mkdir()
    done = lapclip("search", *arguments, "--model", str(trained))
    assert done.returncode == 2
    assert said in done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if line != "reading the model"]
    assert len(lines) <= 3


@pytest.mark.real_data
def test_real_photos(trained: Path, real_data: Path) -> None:
    found = searched(str(real_data / "photos"), "a dog", "--model", str(trained), "--limit", "30")
    assert found["indexed"] == len(found["results"]) == 24
    assert found["unreadable"] == []
    first = found["results"][0]["path"]
    like = searched(str(real_data / "photos"), "--like", first, "--model", str(trained))
    assert like["added"] == 0
    assert like["results"][0]["path"] == first
