from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lapclip.data import decode as decoding
from lapclip.data import packed_store as packed
from lapclip.data.loading import StreamedPixels
from lapclip.data.packed_index import INDEX, PackedIndex
from lapclip.data.packed_store import (
    MIDDLE,
    WHOLE,
    Packed,
    digest_of,
    pack,
    store_folder,
    use_store,
)
from lapclip.data.pixels import View, middle_square, open_image, squeeze_image, whole_side
from lapclip.data.table import ImageFile
from lapclip.errors import DataError
from tests.conftest import examples

SIDE = 16


def draw(path: Path, seed: int, size: tuple[int, int] = (40, 30)) -> ImageFile:
    """An image of its own in a file."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(path, quality=90)
    return ImageFile(path, path.name)


@pytest.fixture
def images(tmp_path: Path) -> list[ImageFile]:
    sizes = [(40, 30), (30, 40), (200, 150), (16, 16), (9, 7), (300, 10)]
    return [
        draw(tmp_path / "photos" / f"{at:02}.jpg", at, sizes[at % len(sizes)]) for at in range(12)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def packs(images: Sequence[ImageFile], folder: Path, **options) -> tuple[Packed, int]:
    """The store, and how many images were decoded for it."""
    decoded = []
    real = packed.prepare

    def counting(data: bytes, side: int, fit: str):
        decoded.append(side)
        return real(data, side, fit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "prepare", counting)
        return pack(images, folder, SIDE, options.pop("fit", MIDDLE), **options), len(decoded)


def test_the_middle_is_exactly_what_the_model_is_shown_of_a_file(
    images: list[ImageFile], folder: Path
) -> None:
    store, decoded = packs(images, folder)
    expected = np.stack([middle_square(picture.path, SIDE) for picture in images])
    assert np.array_equal(store.pixels()[:], expected)
    assert decoded == len(images)
    assert [entry.name for entry in store.entries] == [picture.name for picture in images]


def test_the_whole_is_squeezed_and_its_aspect_known(images: list[ImageFile], folder: Path) -> None:
    store, _ = packs(images, folder, fit=WHOLE)
    for at, picture in enumerate(images):
        image = open_image(picture.path).image
        assert store.entries[at].aspect == image.width / image.height
        plain = squeeze_image(image, SIDE).astype(int)
        assert (
            np.abs(store.pixels()[at] - plain).mean() < 6
        )  # JPEGs are decoded at a fraction of their size
    assert [whole_side(side) for side in (64, 112, 224, 336)] == [80, 128, 256, 384]


def test_one_thread_and_many_write_the_same_store(
    images: list[ImageFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads in (1, 7):
        with ThreadPoolExecutor(threads) as pool:
            monkeypatch.setattr(packed, "decoding_threads", lambda pool=pool: pool)
            packs(images, tmp_path / str(threads), fit=WHOLE)
    for name in (INDEX, "pixels.bin"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "7" / name).read_bytes()


def test_what_is_packed_is_not_decoded_again(images: list[ImageFile], folder: Path) -> None:
    first, _ = packs(images, folder)
    second, decoded = packs(images, folder)
    assert decoded == 0
    assert np.array_equal(first.pixels()[:], second.pixels()[:])


def test_a_changed_file_is_packed_again_and_a_touched_one_is_not(
    images: list[ImageFile], folder: Path
) -> None:
    packs(images, folder)
    os.utime(images[1].path, ns=(1, 1))
    draw(images[3].path, 99)
    store, decoded = packs(images, folder)
    assert decoded == 1
    for at in (1, 3):
        assert np.array_equal(store.pixels()[at], middle_square(images[at].path, SIDE))
    assert packs(images, folder)[1] == 0


def test_files_that_went_and_came_are_seen(images: list[ImageFile], folder: Path) -> None:
    packs(images[:8], folder)
    images[2].path.unlink()
    store, decoded = packs([*images[9:], *images[:4]], folder)
    assert decoded == 3
    assert [(one.where, one.why) for one in store.skipped] == [("02.jpg", "there is no such file")]
    assert store.usable == [0, 1, 2, 3, 4, 6]
    names = [entry.name for entry in store.entries]
    assert names == ["09.jpg", "10.jpg", "11.jpg", "00.jpg", "01.jpg", "03.jpg"]
    rows = store.pixels()
    assert rows.shape == (6, SIDE, SIDE, 3)
    assert len(rows) == 6
    for at, name in enumerate(names):
        assert np.array_equal(rows[at], middle_square(images[0].path.with_name(name), SIDE))
    assert np.array_equal(rows[np.array([4, 0])], np.stack([rows[4], rows[0]]))
    assert np.array_equal(rows[1:3], np.stack([rows[1], rows[2]]))


def test_a_broken_file_is_named_and_tried_again_only_when_it_changes(
    images: list[ImageFile], folder: Path
) -> None:
    whole = images[5].path.read_bytes()
    images[5].path.write_bytes(whole[:-40])
    store, decoded = packs(images, folder)
    assert decoded == 12
    assert [(one.where, one.why) for one in store.skipped] == [("05.jpg", "it ends early")]
    assert 5 not in store.usable
    again, decoded = packs(images, folder)
    assert decoded == 0
    assert again.skipped == store.skipped
    images[5].path.write_bytes(whole)
    mended, decoded = packs(images, folder)
    assert decoded == 1
    assert not mended.skipped


def test_the_same_bytes_under_two_names_share_a_row(images: list[ImageFile], folder: Path) -> None:
    images[7].path.write_bytes(images[2].path.read_bytes())
    store, _ = packs(images, folder)
    assert store.entries[7].row == store.entries[2].row
    assert store.entries[7].digest == store.entries[2].digest
    assert (folder / "pixels.bin").stat().st_size == 11 * SIDE * SIDE * 3


def test_a_line_that_is_not_whole_costs_that_line_only(
    images: list[ImageFile], folder: Path
) -> None:
    expected = np.array(packs(images, folder)[0].pixels()[:])
    index = folder / INDEX
    index.write_bytes(index.read_bytes()[:-9])
    with open(folder / "pixels.bin", "ab") as file:
        file.write(b"half an image")
    store, decoded = packs(images, folder)
    assert decoded == 1
    assert np.array_equal(store.pixels()[:], expected)
    assert all(json.loads(line) for line in index.read_text().splitlines())


@pytest.mark.parametrize("what", ["index", "pixels", "header"])
def test_a_damaged_store_is_made_again(what: str, images: list[ImageFile], folder: Path) -> None:
    expected = np.array(packs(images, folder)[0].pixels()[:])
    if what == "index":
        (folder / INDEX).write_bytes(b"\xff\xfe not json \n" * 5)
    elif what == "pixels":
        (folder / "pixels.bin").write_bytes(bytes(3 * SIDE * SIDE * 3))
    else:
        (folder / INDEX).write_text('{"pixels": "../../elsewhere.bin"}\n')
    store, decoded = packs(images, folder)
    assert decoded == (9 if what == "pixels" else 12)
    if what != "pixels":
        assert np.array_equal(store.pixels()[:], expected)


def test_using_a_few_images_keeps_those_of_other_splits(
    images: list[ImageFile], folder: Path
) -> None:
    packs(images, folder)
    packs(images[:2], folder)
    assert packs(images, folder)[1] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")
def test_only_their_owner_can_read_packed_images(
    empty_cache: Path, images: list[ImageFile], folder: Path
) -> None:
    store = use_store("photos", 32, MIDDLE)
    assert store.stat().st_mode & 0o777 == 0o700
    store.chmod(0o755)  # as earlier releases made it
    assert use_store("photos", 32, MIDDLE).stat().st_mode & 0o777 == 0o700
    pack(images, folder, 32, MIDDLE)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_told_with_what_is_needed(
    images: list[ImageFile], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packed.os, "fsync", full)
        kinds = {(WHOLE, True): True, (WHOLE, False): False, (MIDDLE, True): False}
        for (fit, keep), helps in kinds.items():
            with pytest.raises(DataError, match=r"too little room.*GB more") as caught:
                packs(images, folder, fit=fit, store=keep)
            # Held-out images are never streamed, and those that are streamed already cannot be streamed more.
            assert ("data.stream=always" in caught.value.hint) == helps
    with monkeypatch.context() as patch:
        real = shutil.disk_usage
        patch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=5000))
        with pytest.raises(DataError, match="too little room"):
            packs(images, folder)
    store, _ = packs(images, folder)
    assert len(store.usable) == 12


def test_a_folder_that_cannot_be_written_is_told(images: list[ImageFile], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="LAPCLIP_CACHE"):
        packs(images, tmp_path / "file" / "store")


PACKING = """
import sys, time
from pathlib import Path
from lapclip.data import packed_store as packed
from lapclip.data.table import ImageFile
packed.SAVED_EVERY = 0.0
def told(done, total, what="", /):
    print(done, what, flush=True)
    time.sleep(600 if done == int(sys.argv[3]) else 0.05)
files = sorted(Path(sys.argv[1]).iterdir())
packed.pack([ImageFile(path, path.name) for path in files], Path(sys.argv[2]), 16, "middle", told)
"""


def test_a_killed_packer_goes_on_where_it_was(
    images: list[ImageFile], folder: Path, tmp_path: Path
) -> None:
    arguments = [sys.executable, "-c", PACKING, str(tmp_path / "photos"), str(folder), "5"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("5 "):
                process.kill()
                break
    store, decoded = packs(images, folder)
    assert decoded == 12 - 5
    expected = np.stack([middle_square(picture.path, SIDE) for picture in images])
    assert np.array_equal(store.pixels()[:], expected)


def test_a_second_process_waits_and_uses_what_the_first_made(
    images: list[ImageFile], folder: Path, tmp_path: Path
) -> None:
    arguments = [sys.executable, "-c", PACKING, str(tmp_path / "photos"), str(folder), "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("1 packing")
        store, decoded = packs(images, folder)  # this process, while that one works
        process.stdout.read()
        assert process.wait() == 0
    assert decoded == 0
    assert len(store.usable) == 12


def test_waiting_is_said(images: list[ImageFile], folder: Path) -> None:
    told: list[str] = []
    waited = threading.Event()

    def tell(done: int, total: int, what: str = "", /) -> None:
        told.append(what)
        if what.startswith("waiting"):
            waited.set()

    with PackedIndex(folder, 1).lock(lambda: None):
        thread = threading.Thread(target=lambda: packs(images, folder, progress=tell))
        thread.start()
        assert waited.wait(20)
    thread.join(20)
    assert set(told) == {"waiting for another process that packs", "packing"}


def test_interrupting_keeps_what_is_done(images: list[ImageFile], folder: Path) -> None:
    def interrupt(done: int, total: int, what: str = "", /) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packs(images, folder, progress=interrupt)
    assert packs(images, folder)[1] == 8


@dataclass(frozen=True)
class Gone:
    """A member of an archive that cannot be read any more."""

    name: str

    def stamp(self) -> str:
        return "1"

    def read(self) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_what_cannot_be_read_is_left_out_and_tried_again(
    images: list[ImageFile], folder: Path
) -> None:
    mixed = [images[0], Gone("shard.tar:7.jpg"), images[1]]
    for _ in range(2):
        store = pack(mixed, folder, SIDE, MIDDLE)
        assert store.usable == [0, 2]
        assert [one.where for one in store.skipped] == ["shard.tar:7.jpg"]
        assert "Input/output error" in store.skipped[0].why


@dataclass(frozen=True)
class Held:
    """An image in memory."""

    name: str
    data: bytes
    path: None = None

    def stamp(self) -> str:
        return digest_of(self.data)

    def read(self) -> bytes:
        return self.data


@settings(max_examples=examples(25))
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1.3), st.binary(max_size=3)), max_size=8))
def test_every_image_is_kept_or_named(damage: list[tuple[int, float, bytes]]) -> None:
    mixed: list[Held] = []
    for at, (seed, length, changed) in enumerate(damage):
        file = io.BytesIO()
        Image.fromarray(
            np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
        ).save(file, "PNG")
        data = file.getvalue()
        middle = len(data) // 2
        data = data[:middle] + changed + data[middle + len(changed) :]
        mixed.append(Held(f"{at}.png", data[: int(length * len(data))]))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            store = pack(mixed, Path(folder), SIDE, MIDDLE)
            kept, left_out = (
                {mixed[at].name for at in store.usable},
                {one.where for one in store.skipped},
            )
            assert kept | left_out == {picture.name for picture in mixed}
            assert not kept & left_out
            assert len(store.pixels()) == len(kept) == len(store.entries)
            assert all(one.why for one in store.skipped)
            del store  # Windows removes no file that is mapped


def test_nothing_to_pack_is_an_empty_store(folder: Path) -> None:
    store = pack([], folder, SIDE, MIDDLE)
    assert store.pixels().shape == (0, SIDE, SIDE, 3)


def test_a_store_belongs_to_a_source_a_side_and_a_fit(empty_cache: Path) -> None:
    places = {
        store_folder(source, side, fit)
        for source in "ab"
        for side in (16, 24)
        for fit in (MIDDLE, WHOLE)
    }
    assert len(places) == 8
    assert {place.parent for place in places} == {empty_cache}


def streamed(images: list[ImageFile], folder: Path) -> tuple[Packed, StreamedPixels]:
    looked = pack(images, folder, SIDE, WHOLE, store=False)
    kept = [images[at] for at in looked.usable]
    return looked, StreamedPixels(kept, [entry.digest for entry in looked.entries], SIDE)


def test_streamed_images_are_the_packed_ones(
    images: list[ImageFile], folder: Path, tmp_path: Path
) -> None:
    images[4].path.write_bytes(b"broken")
    looked, stream = streamed(images, folder)
    assert not (folder / "pixels.bin").exists() or (folder / "pixels.bin").stat().st_size == 0
    store = pack(images, tmp_path / "other", SIDE, WHOLE)
    assert looked.usable == store.usable
    assert looked.skipped == store.skipped
    assert [entry.aspect for entry in looked.entries] == [entry.aspect for entry in store.entries]
    rows = store.pixels()[:]
    assert stream.shape == rows.shape
    for wanted in (np.array([7, 0, 7, 3]), slice(2, 9), slice(None), np.int64(5), -1):
        assert np.array_equal(stream[wanted], rows[wanted])
    assert packs(images, folder, fit=WHOLE, store=False)[1] == 0  # looked at once
    kept, decoded = packs(images, folder, fit=WHOLE)
    assert decoded == 11  # packed after all
    assert np.array_equal(kept.pixels()[:], rows)


def test_an_image_that_changes_while_streaming_is_named_and_never_learnt_from(
    images: list[ImageFile], folder: Path
) -> None:
    _, stream = streamed(images, folder)
    draw(images[6].path, 1234)
    with pytest.raises(DataError, match=r"06\.jpg.*has changed"):
        stream[np.array([1, 6])]
    images[6].path.unlink()
    with pytest.raises(DataError, match=r"06\.jpg .* cannot be read"):
        stream[np.array([1, 6])]
    assert stream[np.array([1, 5])].shape == (2, SIDE, SIDE, 3)


def test_faults_that_may_pass_are_not_remembered(
    images: list[ImageFile], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(image, **more):
        raise MemoryError

    heic = folder.parent / "a.heic"
    heic.write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    mixed = [*images, ImageFile(heic, "a.heic")]
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "to_upright_rgb", full)
        patch.setattr(decoding, "available_formats", lambda: ("JPEG",))
        store, _ = packs(mixed, folder)
        assert store.usable == []
        assert {one.why for one in store.skipped} == {
            "there was too little memory for it",
            "HEIC needs the package pillow-heif",
        }
    store, decoded = packs(mixed, folder)
    assert decoded == 13
    assert store.usable == list(range(12))


def test_a_file_swapped_for_one_of_the_same_size_and_date_is_packed_again(
    tmp_path: Path, folder: Path
) -> None:
    picture = ImageFile(tmp_path / "a.bmp", "a.bmp")
    for shade in (10, 200):
        Image.new("RGB", (20, 20), (shade, 0, 0)).save(tmp_path / f"{shade}.bmp")
        os.utime(tmp_path / f"{shade}.bmp", ns=(1, 1))
    for shade in (10, 200):
        os.replace(tmp_path / f"{shade}.bmp", picture.path)
        store, decoded = packs([picture], folder)
        assert decoded == 1
        assert store.pixels()[0].max() == shade


def test_names_that_cannot_be_printed_are_packed_and_named_in_plain_characters(
    folder: Path,
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (20, 20)).save(file, "PNG")
    odd = "a\n\udcff\x1b[31m"
    mixed = [Held(f"{odd}.png", file.getvalue()), Gone(f"{odd}.jpg"), Held(f"{odd}.gif", b"broken")]
    for _ in range(2):
        store = pack(mixed, folder, SIDE, MIDDLE)
        assert store.usable == [0]
        assert [one.where for one in store.skipped] == [
            f"a\\n\\udcff\\x1b[31m.{end}" for end in ("jpg", "gif")
        ]


def test_an_image_that_was_looked_at_and_cannot_be_read_any_more_is_left_out(
    images: list[ImageFile], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs(images[:2], folder, store=False)
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "read", Gone.read)
        store, _ = packs(images[:2], folder)
    assert store.usable == []
    assert len(store.skipped) == 2


def test_a_store_belongs_to_a_way_of_seeing(empty_cache: Path) -> None:
    views = [View(16), View(16, "bilinear"), View(16, resize="squash"), View(16, crop_share=0.875)]
    assert len({store_folder("photos", view, MIDDLE) for view in views}) == 4
    assert store_folder("photos", View(16), MIDDLE) == store_folder("photos", 16, MIDDLE)


PREPARED_AS = {
    (3, 1): [
        142.0, 141.96, 139.18, 125.71, 125.7, 126.06, 141.99, 142.06, 139.18, 142.0, 141.96, 139.18,
        141.55, 141.46, 139.94, 229.72, 223.91, 229.16, 56.79, 69.75, 56.79, 3.48, 4.31, 3.48,
    ],
}  # fmt: skip
"""Weighted means of squares of a few kinds of files, under the versions of decoding and resizing that made them."""


def test_pixels_do_not_change_without_their_version() -> None:
    """Packed stores are found by it, so that a run would learn from images that are no longer decoded so."""
    across, down = np.meshgrid(np.linspace(0, 1, 40) ** 3 * 255, np.linspace(0, 255, 30))
    colours = np.stack([across, down, 255 - across], axis=2).astype(np.uint8)
    image, turned = Image.fromarray(colours), Image.Exif()
    turned[decoding.ORIENTATION_TAG] = 6
    files = [
        (image, {"format": "PNG"}),
        (image, {"format": "PNG", "exif": turned}),
        (image, {"format": "JPEG", "quality": 95}),
        (image.convert("CMYK"), {"format": "TIFF"}),
        (image.quantize(16), {"format": "GIF"}),
        (Image.merge("RGBA", [*image.split(), image.getchannel("R")]), {"format": "PNG"}),
        (Image.fromarray((across * 257).astype(np.uint16)), {"format": "PNG"}),
        (Image.fromarray((across * 16).astype(np.uint16)), {"format": "PNG"}),
    ]
    weights = np.arange(8 * 8 * 3).reshape(8, 8, 3)
    found = []
    for made, options in files:
        file = io.BytesIO()
        made.save(file, **options)
        for view, fit in (
            (View(8), MIDDLE),
            (View(8), WHOLE),
            (View(8, resize="squash", crop_share=0.8), MIDDLE),
        ):
            found.append(
                float(np.average(packed.prepare(file.getvalue(), view, fit)[0], weights=weights))
            )
    versions = (packed.DECODING_VERSION, packed.RESIZING_VERSION)
    # Other releases of Pillow and torch, and other processors, may round a pixel otherwise.
    assert found == pytest.approx(PREPARED_AS[versions], abs=0.3), (
        "raise DECODING_VERSION or RESIZING_VERSION"
    )
