"""One index for each model: which model is taken, and how indexes are listed and removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from lapclip.errors import SearchError
from lapclip.searching.index import index_folder, thumbnail_path
from lapclip.searching.indexes import indexes_of
from lapclip.searching.library import open_library
from lapclip.searching.web import Questions
from lapclip.searching.web.images import Images
from tests.conftest import lapclip

from .made import another_model, draw, draw_many
from .test_search_command import searched


@pytest.fixture
def two(trained: Path, here: Path) -> Path:
    """A folder with runs `one` and `other`, and with photos that `one` has indexed."""
    shutil.copytree(trained, here / "runs" / "one")
    shutil.copytree(trained, here / "runs" / "other")
    shutil.rmtree(here / "runs" / "other" / "model")
    another_model(trained, here / "runs" / "other" / "model")
    draw_many(here / "photos", 3)
    assert searched("photos", "x", "--model", "one")["added"] == 3
    return here


def test_another_model_costs_no_index_and_the_one_used_last_is_taken(two: Path) -> None:
    other = searched("photos", "x", "--model", "other")
    assert (other["added"], other["notes"]) == (3, [])
    for _ in range(2):
        again = searched("photos", "x")
        assert (Path(again["model"]).name, again["added"]) == ("other", 0)
    assert searched("photos", "x", "--model", "one")["added"] == 0
    draw(two / "photos" / "new.png", 9)
    again = searched("photos", "x")
    assert (Path(again["model"]).name, again["added"], again["indexed"]) == ("one", 1, 4)
    assert again["index"] != other["index"]
    assert len(indexes_of(two / "photos")) == 2


def test_a_model_that_is_gone_is_said_so(two: Path) -> None:
    shutil.rmtree(two / "runs" / "one")
    found = searched("photos", "x")
    assert (found["model"], found["added"]) == (str(Path("runs") / "other"), 3)
    (note,) = found["notes"]
    assert f"{Path('runs') / 'one'}, which is gone" in note
    assert f"lapclip search photos --forget --model {Path('runs') / 'one'}" in note
    assert searched("photos", "x")["notes"] == []
    listed = searched("photos", "--forget")["indexes"]
    assert [(Path(one["model"]).name, one["model_is_gone"]) for one in listed] == [
        ("other", False),
        ("one", True),
    ]


def test_a_model_that_changed_since_gets_a_new_index_and_says_so(two: Path) -> None:
    shutil.rmtree(two / "runs" / "one" / "model")
    (two / "runs" / "other" / "model").rename(two / "runs" / "one" / "model")
    found = searched("photos", "x")
    assert (found["model"], found["added"]) == (str(Path("runs") / "one"), 3)
    old = indexes_of(two / "photos")[-1]
    command = f"lapclip search photos --forget --model {old.fingerprint}"
    assert command in found["notes"][0]
    assert searched(*command.split()[2:])["removed"][0]["path"] == str(old.path)
    assert (searched("photos", "x")["notes"], searched("photos", "x")["added"]) == ([], 0)


def test_indexes_are_listed_with_their_sizes_and_removed_by_name(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched("photos", "x", "--model", "other")
    listed = searched("photos", "--forget")
    assert listed["removed"] == []
    first, second = listed["indexes"]
    assert [Path(one["model"]).name for one in (first, second)] == ["other", "one"]
    assert first["images"] == 3
    assert first["bytes"] >= sum(
        path.stat().st_size for path in Path(first["path"]).glob("vectors-*")
    )
    done = lapclip("search", "photos", "--forget")  # nobody to ask
    assert "Nothing was removed" in done.stdout
    assert f"--forget --model {Path('runs') / 'one'}" in done.stdout
    wrong = lapclip("search", "photos", "--forget", "--model", "neither", "--json")
    assert wrong.returncode == 2
    assert "made no index" in json.loads(wrong.stdout)["error"]
    gone = searched("photos", "--forget", "--model", second["fingerprint"])
    assert (gone["removed"], gone["indexes"]) == ([second], [first])
    assert not Path(second["path"]).exists()
    shutil.rmtree(two / "photos")  # the images may be gone too
    assert len(searched("photos", "--forget", "--model", "other")["removed"]) == 1
    assert not index_folder(two / "photos").exists()
    assert "no index" in lapclip("search", "photos", "--forget").stdout


def test_an_open_page_brings_back_nothing_of_an_index_that_is_forgotten(two: Path) -> None:
    library = open_library(two / "photos", "one")
    images = Images(library)
    first, second, *_ = (library.entry(hit.number) for hit in library.newest())
    assert first
    assert second
    assert images.small(first)
    assert thumbnail_path(library.index_path, first.digest).exists()
    assert lapclip("search", "photos", "--forget", "--model", "one").returncode == 0
    assert not library.index_path.exists()
    assert images.small(second)  # the page goes on; only nothing is written for it
    assert not index_folder(two / "photos").exists()
    questions = Questions(library)
    newest = questions.read({})
    with pytest.raises(SearchError, match="removed"):
        questions.answer(newest)
    draw(two / "photos" / "new.png", 9)
    assert searched("photos", "x", "--model", "one")["added"] == 4
    assert questions.answer(newest)["count"] == 4  # made anew: the page follows
    assert questions.library.entry(4)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
def test_an_index_is_for_its_owner_alone(two: Path, data_directory: Path) -> None:
    index = indexes_of(two / "photos")[0].path
    made = [index, *(above for above in index.parents if above.is_relative_to(data_directory))]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}
    index.chmod(0o755)  # as a copy may have left it
    index.parent.chmod(0o777)
    searched("photos", "x", "--model", "one")
    assert {path.stat().st_mode & 0o777 for path in (index, index.parent)} == {0o700}
