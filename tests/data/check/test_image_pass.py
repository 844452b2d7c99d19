from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from lapclip.data.check import image_pass
from lapclip.data.check.image_pass import (
    AT_ONCE,
    find_similar,
    groups,
    hash_and_thumbnail,
    inspect_image,
    inspect_images,
)
from lapclip.data.table import ImageFile

from .made import encoded, odd_images, scene

FILES = list(odd_images().values())


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.sampled_from(FILES),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=6)), max_size=6),
    share=st.floats(0, 1),
)
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_are_an_image_or_a_fault_and_never_an_error(
    data: bytes, changes: list[tuple[int, bytes]], share: float
) -> None:
    damaged = bytearray(data)
    for at, new in changes:
        start = at % max(1, len(damaged))
        damaged[start : start + len(new)] = new
    seen = inspect_image(bytes(damaged[: int(len(damaged) * share)]))
    assert bool(seen.fault) != bool(seen.thumbnail)


def test_the_same_bytes_give_the_same_digest_and_others_another() -> None:
    first, again, other = inspect_image(FILES[0]), inspect_image(bytes(FILES[0])), inspect_image(FILES[1])
    assert first == again
    assert first.digest != other.digest


def test_every_image_is_seen_in_order_and_a_missing_one_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(scene(1)))
    here, gone = ImageFile(tmp_path / "a.jpg", "a.jpg"), ImageFile(tmp_path / "b.jpg", "b.jpg")
    told: list[tuple[int, int]] = []
    seen = inspect_images([here, gone, *[here] * AT_ONCE], lambda done, total: told.append((done, total)))
    assert [facts.fault != "" for facts in seen] == [False, True, *[False] * AT_ONCE]
    assert "no such file" in seen[1].fault
    assert told == [(AT_ONCE, AT_ONCE + 2), (AT_ONCE + 2, AT_ONCE + 2)]
    assert (seen[0].width, seen[0].height) == (160, 120)


def looks(*images: Image.Image) -> list[tuple[int, int]]:
    hashes, thumbnails = zip(*[hash_and_thumbnail(image) for image in images], strict=True)
    return [(first, second) for first, second, _ in find_similar(hashes, thumbnails)]


@pytest.mark.parametrize(
    "edit",
    [
        lambda image: image.resize((80, 60)),
        lambda image: image.crop((2, 2, 158, 118)),
        lambda image: ImageEnhance.Brightness(image).enhance(1.1),
        lambda image: image.resize((120, 120)),
    ],
    ids=["halved", "cropped", "brighter", "squeezed"],
)
def test_an_edited_image_is_alike_and_others_are_not(edit) -> None:
    assert looks(*[scene(seed) for seed in range(20)], edit(scene(7))) == [(7, 20)]


def test_images_of_one_colour_are_alike_only_in_that_colour() -> None:
    flat = [Image.new("RGB", (50, 50), colour) for colour in ("red", "blue", "red")]
    assert looks(*flat) == [(0, 2)]


def test_a_jpeg_that_is_compressed_again_is_alike(tmp_path) -> None:
    (tmp_path / "again.jpg").write_bytes(encoded(scene(3), quality=20))
    assert looks(scene(3), Image.open(tmp_path / "again.jpg").convert("RGB")) == [(0, 1)]


@pytest.mark.parametrize("at_once", [10, 2_000_000])
def test_bands_find_the_pairs_that_comparing_all_with_all_finds(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_pass, "CANDIDATES_AT_ONCE", at_once)
    draw = random.Random(0)
    hashes = [draw.getrandbits(64) for _ in range(100)]
    for distance in range(15):
        for at in range(6):
            hashes.append(hashes[at] ^ sum(1 << bit for bit in draw.sample(range(64), distance)))
    found = {(first, second) for first, second, _ in find_similar(hashes, [b"\0" * 12] * len(hashes))}
    apart = {(a, b): (hashes[a] ^ hashes[b]).bit_count() for a in range(len(hashes)) for b in range(a + 1, len(hashes))}
    firsts = {value: hashes.index(value) for value in hashes}
    certain = {
        pair
        for pair, bits in apart.items()
        if bits < image_pass.MOST_BITS and all(firsts[hashes[at]] == at for at in pair)
    }
    assert len(certain) > 50
    assert certain <= found
    assert all(apart[pair] <= image_pass.MOST_BITS for pair in found)


def test_many_images_with_one_hash_are_paired_with_the_first_only() -> None:
    assert find_similar([5] * 1000, [bytes(12)] * 1000) == [(0, at, 0.0) for at in range(1, 1000)]


def test_nothing_and_one_image_have_no_pairs() -> None:
    assert find_similar([], []) == []
    assert find_similar([1], [b"\0"]) == []


def test_groups_hold_together_what_is_alike_through_others() -> None:
    assert groups([(0, 4), (1, 2), (4, 7), (2, 3)]) == [[0, 4, 7], [1, 2, 3]]


def test_a_hash_ignores_brightness_and_fits_64_bits() -> None:
    dark = Image.fromarray(np.asarray(scene(1)) // 2)
    assert (hash_and_thumbnail(dark)[0] ^ hash_and_thumbnail(scene(1))[0]).bit_count() <= 4
    assert 0 <= hash_and_thumbnail(dark)[0] < 2**64


def test_another_thing_before_the_same_background_is_not_the_same_image() -> None:
    plain, with_thing = scene(1), scene(1)
    with_thing.paste("black", (60, 40, 105, 80))
    (first, second) = (hash_and_thumbnail(image)[1] for image in (plain, with_thing))
    assert image_pass.difference(first, second) > image_pass.SAME
    assert image_pass.difference(first, hash_and_thumbnail(scene(1).resize((80, 60)))[1]) < image_pass.SAME
