"""Several processes and one index: a killed one, two at once, and two with different models."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lapclip.errors import SearchError
from lapclip.searching.index import Index, index_folder
from lapclip.searching.indexes import indexes_of, remove
from lapclip.searching.library import Library
from lapclip.searching.update_index import update_index
from tests.searching.made import (
    BATCH,
    Watched,
    another_model,
    draw_many,
    index_now,
    vector_of,
    vectors_of,
)

KILLED = """
import sys
from pathlib import Path
import psutil
from lapclip.searching import update_index
from tests.searching.made import Watched, index_now

def die(batch):
    if batch == 3:
        psutil.Process().kill()

update_index.SAVED_EVERY = 0.0
index_now(Path(sys.argv[2]), Watched(sys.argv[1], die))
"""


def start(script: str, *arguments: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_killed_indexer_loses_a_batch_at_most(trained: Path, photos: Path) -> None:
    made = draw_many(photos, 20)
    process = start(KILLED, trained, photos)
    _, errors = process.communicate(timeout=120)
    assert process.returncode not in (0, 1), errors
    model = Watched(trained)
    library = index_now(photos, model)
    assert sum(model.batches) == 20 - 3 * BATCH
    assert library.count == 20
    for path, vector in zip(made, vectors_of(made, model), strict=True):
        assert np.abs(vector_of(library, path.name) - vector).max() < 1e-3


SLOW = """
import sys, time
from pathlib import Path
from lapclip.searching import update_index
from tests.searching.made import Watched, index_now

model, photos, talk = map(Path, sys.argv[1:])

def wait(batch):
    if batch == int((talk / "stop-at").read_text()):
        (talk / "waiting").touch()
        while not (talk / "go").exists():
            time.sleep(0.02)

update_index.SAVED_EVERY = 0.0
print(index_now(photos, Watched(model, wait)).count)
"""


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_the_second_of_two_answers_from_what_there_is(
    trained: Path, photos: Path, tmp_path: Path
) -> None:
    draw_many(photos, 20)
    (tmp_path / "stop-at").write_text("2")
    process = start(SLOW, trained, photos, tmp_path)
    try:
        wait_for(tmp_path / "waiting", process)
        second = index_now(photos, Watched(trained))
        assert second.count == 2 * BATCH
        assert len(second.find("anything", 99)) == 2 * BATCH
        assert second.update.notes == [
            "Another process is indexing this folder: this is what it has so far."
        ]
    finally:
        (tmp_path / "go").touch()
        output, errors = process.communicate(timeout=120)
    assert output.strip() == "20", errors


def test_the_second_waits_with_a_word_where_there_is_nothing_yet(
    trained: Path, photos: Path, tmp_path: Path
) -> None:
    draw_many(photos, 8)
    (tmp_path / "stop-at").write_text("0")
    process = start(SLOW, trained, photos, tmp_path)
    said: list[str] = []

    def told(what: str) -> None:
        said.append(what)
        (tmp_path / "go").touch()

    try:
        wait_for(tmp_path / "waiting", process)
        second = index_now(photos, Watched(trained), told)
    finally:
        (tmp_path / "go").touch()
        process.communicate(timeout=120)
    assert said[0] == "waiting for another process that indexes this folder"
    assert second.count == 8


def test_two_processes_with_two_models_do_not_meet(
    trained: Path, photos: Path, tmp_path: Path
) -> None:
    made, other = draw_many(photos, 20), another_model(trained, tmp_path / "other")
    (tmp_path / "stop-at").write_text("2")
    process = start(SLOW, trained, photos, tmp_path)
    try:
        wait_for(tmp_path / "waiting", process)
        model = Watched(other)
        second = index_now(photos, model)
        assert (second.count, second.update.notes) == (20, [])
        (one,) = [one for one in indexes_of(photos) if one.reference == str(trained)]
        with pytest.raises(SearchError, match="is indexing"):
            remove(one)
    finally:
        (tmp_path / "go").touch()
        output, errors = process.communicate(timeout=120)
    assert output.strip() == "20", errors
    assert sorted(str(one.reference) for one in indexes_of(photos)) == sorted(
        [str(other), str(trained)]
    )
    for path, vector in zip(made, vectors_of(made, model), strict=True):
        assert np.abs(vector_of(second, path.name) - vector).max() < 1e-3
    first = Watched(trained)
    library = index_now(photos, first)
    assert first.batches == []
    assert np.abs(vector_of(library, "019.png") - vectors_of(made[-1:], first)[0]).max() < 1e-3


def test_vectors_of_another_model_are_never_asked(trained: Path, photos: Path) -> None:
    """Another process may take its index over between the end of indexing and the first question."""
    draw_many(photos, 3)
    model = Watched(trained)
    index = Index(index_folder(photos))
    found = update_index(index, photos, model)
    other = Index(index_folder(photos))
    other.open()
    other.begin("another model", 8)
    with pytest.raises(SearchError, match="with another model"):
        Library(photos, index, model, found)
