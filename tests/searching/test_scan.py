from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lapclip.data.find_images import Scan
from lapclip.errors import DataError
from lapclip.searching.update_index import check_folder


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def names(folder: Path) -> list[str]:
    return [path.replace(os.sep, "/") for path, _ in Scan(folder)]


def test_images_in_all_folders_by_their_names(photos: Path) -> None:
    touch(photos, "b.jpg", "a.JPEG", "deep/er/c.webp", "notes.txt", "no-ending", "deep/d.heic")
    assert names(photos) == [
        "a.JPEG",
        "b.jpg",
        "deep/d.heic",
        "deep/er/c.webp",
    ]


def test_hidden_thrown_away_and_run_folders_are_left_out(photos: Path) -> None:
    touch(photos, "a.jpg", ".hidden.jpg", ".cache/b.jpg", "@eaDir/c.jpg", "$RECYCLE.BIN/d.jpg")
    touch(photos, "All.photoslibrary/resources/g.jpg")
    touch(
        photos,
        "runs/first/run.toml",
        "runs/first/events.jsonl",
        "runs/first/images/e.jpg",
        "runs/f.jpg",
    )
    assert names(photos) == ["a.jpg", "runs/f.jpg"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_links_are_followed_once_and_loops_end(photos: Path, tmp_path: Path) -> None:
    touch(photos, "in/a.jpg")
    touch(tmp_path, "outside/b.jpg")
    (photos / "in" / "up").symlink_to(photos)
    (photos / "in" / "self.jpg").symlink_to("self.jpg")
    (photos / "in" / "lost.jpg").symlink_to("nowhere.jpg")
    (photos / "linked").symlink_to(tmp_path / "outside")
    (photos / "linked-again").symlink_to(tmp_path / "outside")
    assert names(photos) == ["in/a.jpg", "linked/b.jpg"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names there")
def test_a_pipe_that_is_called_an_image_is_not_waited_for(photos: Path) -> None:
    os.mkfifo(photos / "pipe.jpg")
    touch(photos, "a.jpg")
    assert names(photos) == ["a.jpg"]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may look into every folder"
)
def test_a_closed_folder_hides_its_images(photos: Path) -> None:
    touch(photos, "a.jpg", "closed/b.jpg")
    (photos / "closed").chmod(0)
    try:
        scan = Scan(photos)
        found = [path for path, _ in scan]
    finally:
        (photos / "closed").chmod(0o755)
    assert found == ["a.jpg"]
    assert scan.closed == ["closed"]
    assert scan.hides("closed/b.jpg")
    assert not scan.hides("closed-not/b.jpg")


def test_no_folder(photos: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        check_folder(photos / "none")
