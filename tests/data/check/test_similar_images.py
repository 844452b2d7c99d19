from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from lapclip.data.check import similar_images
from lapclip.data.check.similar_images import find_similar, groups, hash_and_thumbnail

from .made import encoded, scene


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
    monkeypatch.setattr(similar_images, "CANDIDATES_AT_ONCE", at_once)
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
        if bits < similar_images.MOST_BITS and all(firsts[hashes[at]] == at for at in pair)
    }
    assert len(certain) > 50
    assert certain <= found
    assert all(apart[pair] <= similar_images.MOST_BITS for pair in found)


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
    assert similar_images.difference(first, second) > similar_images.SAME
    assert similar_images.difference(first, hash_and_thumbnail(scene(1).resize((80, 60)))[1]) < similar_images.SAME
