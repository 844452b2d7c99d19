from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lapclip.errors import DataError
from lapclip.searching import update_index as indexing
from lapclip.searching.index import Index, index_folder, thumbnail_path
from tests.searching.made import (
    BATCH,
    Watched,
    draw,
    draw_many,
    index_at,
    index_now,
    names,
    vector_of,
    vectors_of,
)


def test_every_image_gets_the_vector_that_the_model_gives_it(trained: Path, photos: Path) -> None:
    made = draw_many(photos, 10)
    model = Watched(trained)
    library = index_now(photos, model)
    assert library.count == library.update.added == 10
    expected = vectors_of(made, model)
    for path, vector in zip(made, expected, strict=True):
        assert np.abs(vector_of(library, path.name) - vector).max() < 1e-3  # float16


def test_second_pass_reads_nothing_and_a_changed_file_alone_is_done_again(
    trained: Path, photos: Path
) -> None:
    draw_many(photos, 6)
    before = index_now(photos, Watched(trained))
    numbers = {hit.path.name: hit.number for hit in before.find("x", 99)}
    model = Watched(trained)
    assert index_now(photos, model).update.added == 0
    assert model.batches == []
    draw(photos / "002.png", 77, side=44)
    os.utime(photos / "003.png", (1, 1))  # touched: the same bytes
    library = index_now(photos, model)
    assert (library.update.added, library.update.moved, library.count) == (1, 1, 6)
    assert model.batches == [1]
    assert {hit.path.name: hit.number for hit in library.find("x", 99)} == numbers
    assert (
        np.abs(vector_of(library, "002.png") - vectors_of([photos / "002.png"], model)[0]).max()
        < 1e-3
    )


def test_renamed_keep_their_vector_and_number_copies_get_their_own_and_deleted_leave(
    trained: Path, photos: Path
) -> None:
    draw_many(photos, 5)
    before = {
        hit.path.name: hit.number for hit in index_now(photos, Watched(trained)).find("x", 99)
    }
    (photos / "elsewhere").mkdir()
    (photos / "000.png").rename(photos / "elsewhere" / "renamed.png")
    shutil.copy(photos / "001.png", photos / "copy.png")
    (photos / "002.png").unlink()
    model = Watched(trained)
    library = index_now(photos, model)
    assert model.batches == []  # the model had nothing to do
    assert (library.update.added, library.update.moved, library.update.removed) == (0, 2, 1)
    now = {hit.path.name: hit.number for hit in library.find("x", 99)}
    assert set(now) == {"renamed.png", "001.png", "copy.png", "003.png", "004.png"}
    assert now["renamed.png"] == before["000.png"]
    assert now["copy.png"] not in before.values()
    assert np.array_equal(vector_of(library, "copy.png"), vector_of(library, "001.png"))
    assert library.entry(before["002.png"]) is None


def test_the_small_form_of_a_deleted_image_goes_unless_a_copy_is_left(
    trained: Path, photos: Path
) -> None:
    draw_many(photos, 3)
    shutil.copy(photos / "000.png", photos / "copy.png")
    library = index_now(photos, Watched(trained))
    kept = {
        entry.path: thumbnail_path(library.index_path, entry.digest)
        for entry in library._index.entries()
    }
    for path in kept.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"small")
    (photos / "000.png").unlink()
    (photos / "001.png").unlink()
    index_now(photos, Watched(trained))
    assert {name: path.exists() for name, path in kept.items()} == {
        "000.png": True,
        "001.png": False,
        "002.png": True,
        "copy.png": True,
    }


def test_files_that_swap_names_swap_vectors(trained: Path, photos: Path) -> None:
    draw_many(photos, 3)
    library = index_now(photos, Watched(trained))
    first, second = vector_of(library, "000.png"), vector_of(library, "001.png")
    os.replace(photos / "000.png", photos / "aside")
    os.replace(photos / "001.png", photos / "000.png")
    os.replace(photos / "aside", photos / "001.png")
    os.utime(photos / "000.png", (5, 5))
    os.utime(photos / "001.png", (6, 6))
    library = index_now(photos, Watched(trained))
    assert library.count == 3
    assert np.array_equal(vector_of(library, "001.png"), first)
    assert np.array_equal(vector_of(library, "000.png"), second)


def test_unreadable_are_listed_not_tried_again_and_indexed_once_mended(
    trained: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_many(photos, 2)
    (photos / "bad.jpg").write_bytes(b"this is no image")
    (photos / "empty.png").touch()
    library = index_now(photos, Watched(trained))
    assert dict(library.update.unreadable) == {
        "bad.jpg": "it is not an image of a known form",
        "empty.png": "it is empty",
    }
    read = []
    real = indexing.read_image
    monkeypatch.setattr(
        indexing, "read_image", lambda path, *rest: read.append(path.name) or real(path, *rest)
    )
    library = index_now(photos, Watched(trained))
    assert read == []
    assert len(library.update.unreadable) == 2
    draw(photos / "good.png", 9).replace(photos / "bad.jpg")
    library = index_now(photos, Watched(trained))
    assert read == ["bad.jpg"]
    assert names(library) == ["000.png", "001.png", "bad.jpg"]
    assert [path for path, _ in library.update.unreadable] == ["empty.png"]


def test_an_image_that_breaks_can_no_longer_be_found(trained: Path, photos: Path) -> None:
    draw_many(photos, 3)
    index_now(photos, Watched(trained))
    (photos / "001.png").write_bytes(b"broken")
    library = index_now(photos, Watched(trained))
    assert names(library) == ["000.png", "002.png"]
    assert [path for path, _ in library.update.unreadable] == ["001.png"]


def bomb(path: Path) -> None:
    """A PNG of a few hundred bytes that claims 100,000 x 100,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        )

    size = (100_000).to_bytes(4, "big")
    header = chunk(b"IHDR", size + size + bytes([8, 2, 0, 0, 0]))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(b"\0" * 9999))
        + chunk(b"IEND", b"")
    )


def test_a_bomb_is_unreadable_and_no_crash(trained: Path, photos: Path) -> None:
    draw_many(photos, 1)
    bomb(photos / "bomb.png")
    library = index_now(photos, Watched(trained))
    assert library.count == 1
    ((path, reason),) = library.update.unreadable
    assert path == "bomb.png"
    assert "megapixels" in reason or "million" in reason


def test_a_date_beyond_what_the_index_holds(trained: Path, photos: Path) -> None:
    draw_many(photos, 2)
    os.utime(photos / "001.png", (12e9, 12e9))  # the year 2350, where the file system knows it
    assert index_now(photos, Watched(trained)).count == 2
    model = Watched(trained)
    assert index_now(photos, model).update.moved == 0
    assert model.batches == []


def test_forms_of_images(trained: Path, photos: Path) -> None:
    image = Image.open(draw(photos / "one.png", 1))
    image.save(photos / "two.JPG", quality=95)
    for name in ("three.webp", "four.bmp", "five.tiff"):
        image.save(photos / name)
    image.save(photos / "six.gif", save_all=True, append_images=[Image.new("RGB", image.size)])
    (photos / "notes.txt").write_text("not an image")
    library = index_now(photos, Watched(trained))
    assert library.count == 6
    assert library.update.unreadable == []


def test_heic_photos(trained: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    Image.open(draw(photos / "one.png", 1, side=64)).save(photos / "phone.HEIC", format="HEIF")
    monkeypatch.setattr("lapclip.searching.read_images._reads_heic", lambda: False)
    library = index_now(photos, Watched(trained))
    ((path, reason),) = library.update.unreadable
    assert path == "phone.HEIC"
    assert "[heic]" in reason
    monkeypatch.undo()
    monkeypatch.setenv("LAPCLIP_DATA", str(photos.parent / "data-directory"))
    library = index_now(
        photos, Watched(trained)
    )  # the extra was installed since: read without being touched
    assert names(library) == ["one.png", "phone.HEIC"]


def test_ctrl_c_keeps_what_is_done_and_the_next_call_goes_on(trained: Path, photos: Path) -> None:
    draw_many(photos, 20)

    def interrupt(batch: int) -> None:
        if batch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=f"{2 * BATCH} of 20 images are indexed"):
        index_now(photos, Watched(trained, interrupt))
    model = Watched(trained)
    library = index_now(photos, model)
    assert sum(model.batches) == 20 - 2 * BATCH
    assert library.count == 20


def test_a_folder_that_changes_while_it_is_indexed(trained: Path, photos: Path) -> None:
    draw_many(photos, 40)

    def change(batch: int) -> None:
        if batch == 0:  # files further on than what is read ahead
            (photos / "039.png").unlink()
            draw(photos / "038.png", 99)
            draw(photos / "new.png", 100)
            shutil.rmtree(photos / "none", ignore_errors=True)

    library = index_now(photos, Watched(trained, change))
    assert names(library) == [f"{at:03}.png" for at in range(39)]
    assert library.update.unreadable == []
    model = Watched(trained)
    library = index_now(photos, model)
    assert names(library) == [*(f"{at:03}.png" for at in range(39)), "new.png"]
    assert (
        np.abs(vector_of(library, "038.png") - vectors_of([photos / "038.png"], model)[0]).max()
        < 1e-3
    )


@pytest.mark.skipif(
    sys.platform == "win32", reason="Windows keeps a user's folders from others by itself"
)
def test_the_index_is_the_users_own(trained: Path, photos: Path) -> None:
    draw_many(photos, 1)
    index_now(photos, Watched(trained))
    assert index_at(photos).stat().st_mode & 0o077 == 0
    assert index_folder(photos).stat().st_mode & 0o077 == 0


def test_nothing_is_written_into_the_folder(trained: Path, photos: Path) -> None:
    draw_many(photos, 3)
    before = {path: path.stat().st_mtime_ns for path in [photos, *photos.iterdir()]}
    photos.chmod(0o555)
    try:
        library = index_now(photos, Watched(trained))
        assert library.count == 3
        assert {path: path.stat().st_mtime_ns for path in [photos, *photos.iterdir()]} == before
    finally:
        photos.chmod(0o755)


def test_a_disk_that_is_not_there_does_not_cost_the_index(trained: Path, photos: Path) -> None:
    draw_many(photos, 4)
    index_now(photos, Watched(trained))
    photos.rename(photos.parent / "unplugged")
    photos.mkdir()
    with pytest.raises(DataError, match="where 4 were before"):
        index_now(photos, Watched(trained))
    photos.rmdir()
    (photos.parent / "unplugged").rename(photos)
    model = Watched(trained)
    assert index_now(photos, model).count == 4
    assert model.batches == []


def test_lost_vectors_and_a_damaged_table_are_made_again(trained: Path, photos: Path) -> None:
    draw_many(photos, 6)
    index_now(photos, Watched(trained)).close()
    place = index_at(photos)
    (vectors,) = place.glob("vectors-*.f16")
    os.truncate(vectors, vectors.stat().st_size // 2)
    model = Watched(trained)
    library = index_now(photos, model)
    assert sum(model.batches) == 6  # all of the damaged part
    assert library.count == 6
    library.close()
    (place / "pictures.db").write_bytes(b"not a database" * 100)
    library = index_now(photos, Watched(trained))
    assert (
        library.update.notes[0] == "The index was damaged, or of another version, and is made anew."
    )
    assert library.count == 6


def test_an_index_of_another_version_is_made_anew(trained: Path, photos: Path) -> None:
    draw_many(photos, 3)
    index_now(photos, Watched(trained)).close()
    with closing(sqlite3.connect(index_at(photos) / "pictures.db")) as database, database:
        database.execute("UPDATE about SET value = '1' WHERE name = 'format'")
    model = Watched(trained)
    library = index_now(photos, model)
    assert "of another version" in library.update.notes[0]
    assert (library.count, sum(model.batches)) == (3, 3)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not allow such names")
def test_odd_names(trained: Path, photos: Path) -> None:
    odd = [
        "line\nbreak.png",
        "[red]markup.png",
        "-dash.png",
        "esc\x1b[31m.png",
        os.fsdecode(b"bytes\xff.png"),
    ]
    for at, name in enumerate(odd):
        try:
            draw(photos / "plain.png", at).rename(photos / name)
        except OSError:
            assert sys.platform == "darwin", name  # which refuses bytes that are no text
    there = sorted(os.listdir(photos))
    library = index_now(photos, Watched(trained))
    assert names(library) == there
    model = Watched(trained)
    assert index_now(photos, model).count == len(there)
    assert model.batches == []


def test_vectors_that_no_image_uses_are_given_back(
    trained: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapclip.searching.index.SPARE_ROWS", 4)
    draw_many(photos, 12)
    first = index_now(photos, Watched(trained))
    kept = {name: vector_of(first, name) for name in ("000.png", "011.png")}
    first.close()
    for at in range(1, 11):
        (photos / f"{at:03}.png").unlink()
    library = index_now(photos, Watched(trained))
    (vectors,) = index_at(photos).glob("vectors-*.f16")
    assert vectors.stat().st_size == 2 * 2 * library.model.width
    for name, vector in kept.items():
        assert np.array_equal(vector_of(library, name), vector)
    draw(photos / "later.png", 50)
    assert names(index_now(photos, Watched(trained))) == ["000.png", "011.png", "later.png"]


def test_vectors_without_an_image_do_not_count(trained: Path, photos: Path) -> None:
    """A process killed between the two leaves them, the last one perhaps in part."""
    draw_many(photos, 2)
    library = index_now(photos, Watched(trained))
    index = Index(index_at(photos))
    index.open()
    assert index.append(np.ones((3, library.model.width), np.float32)) == [2, 3, 4]
    (vectors,) = index_at(photos).glob("vectors-*.f16")
    os.truncate(vectors, vectors.stat().st_size - 7)
    draw(photos / "next.png", 8)
    model = Watched(trained)
    library = index_now(photos, model)
    assert names(library) == ["000.png", "001.png", "next.png"]
    assert (
        np.abs(vector_of(library, "next.png") - vectors_of([photos / "next.png"], model)[0]).max()
        < 1e-3
    )


def test_a_chain_of_names_where_each_file_takes_the_next_ones_place(
    trained: Path, photos: Path
) -> None:
    """The vector of the last is wanted after the image that named it is another."""
    draw_many(photos, 9)
    library = index_now(photos, Watched(trained))
    vectors = [vector_of(library, f"{at:03}.png") for at in range(9)]
    draw(photos / "new.png", 70).rename(photos / "aside")
    for at in reversed(range(9)):
        (photos / f"{at:03}.png").rename(photos / f"{at + 1:03}.png")
        os.utime(photos / f"{at + 1:03}.png", (at, at))
    (photos / "aside").rename(photos / "000.png")
    model = Watched(trained)
    library = index_now(photos, model)
    assert model.batches == [1]
    assert library.count == 10
    for at, vector in enumerate(vectors):
        assert np.array_equal(vector_of(library, f"{at + 1:03}.png"), vector)


def zeros(content: bytearray) -> None:
    content[:] = bytes(len(content))


def noise(content: bytearray) -> None:
    content[:] = np.random.default_rng(0).bytes(len(content))


def truncated(content: bytearray) -> None:
    del content[len(content) // 2 - 1 :]


def one_bit(content: bytearray) -> None:
    content[len(content) // 3] ^= 64


def emptied(content: bytearray) -> None:
    content.clear()


@pytest.mark.parametrize("damage", [zeros, noise, truncated, one_bit, emptied])
def test_a_damaged_part_is_made_again_and_never_ranked(
    trained: Path,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[bytearray], None],
) -> None:
    monkeypatch.setattr("lapclip.searching.index.PART_ROWS", 4)
    draw_many(photos, 10)
    before = index_now(photos, Watched(trained))
    ranked = before.find("a red circle", 99)
    files = sorted(before.index_path.glob("vectors-*.f16"))
    before.close()
    for file in files:
        content = bytearray(file.read_bytes())
        damage(content)
        file.write_bytes(content)
    after = index_now(photos, Watched(trained))
    assert [(hit.path, hit.number) for hit in after.find("a red circle", 99)] == [
        (hit.path, hit.number) for hit in ranked
    ]
    assert [hit.score for hit in after.find("a red circle", 99)] == pytest.approx(
        [hit.score for hit in ranked], abs=1e-3
    )
    (note,) = [note for note in after.update.notes if "damaged" in note]
    assert f"{after.update.added} image" in note
    if damage is one_bit:
        assert 0 < after.update.added <= 4
    after.close()
    again = index_now(photos, Watched(trained))
    assert again.update.added == 0
    assert not [note for note in again.update.notes if "damaged" in note]


def test_rows_that_a_killed_process_left_without_a_checksum_are_written_over(
    trained: Path, photos: Path
) -> None:
    draw_many(photos, 5)
    before = index_now(photos, Watched(trained))
    (file,) = before.index_path.glob("vectors-*.f16")
    before.close()
    with open(file, "ab") as end:
        end.write(b"\x01" * 3000)
    draw(photos / "new.png", 99)
    after = index_now(photos, Watched(trained))
    assert (after.count, after.update.added) == (6, 1)
    assert not [note for note in after.update.notes if "damaged" in note]
    assert (
        np.abs(
            vector_of(after, "new.png") - vectors_of([photos / "new.png"], Watched(trained))[0]
        ).max()
        < 1e-3
    )
