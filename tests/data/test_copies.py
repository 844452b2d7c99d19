"""Copies of one image: which are found, whatever their order, and that they are remembered."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance

from lapclip.config import DataConfig
from lapclip.data import copies
from lapclip.data.copies import (
    content_of,
    copy_keys,
    differences,
    find_similar,
    groups,
    hash_and_thumbnail,
    signature_of,
)
from lapclip.data.loading import load_data
from tests.data.check.made import encoded, scene


def alike(*images: Image.Image) -> list[tuple[int, int]]:
    hashes, thumbnails = zip(*[hash_and_thumbnail(image) for image in images], strict=True)
    return find_similar(hashes, thumbnails)


def difference(first: bytes, second: bytes) -> float:
    one, other = (np.frombuffer(each, np.uint8).reshape(-1, 3) for each in (first, second))
    (there,), (back,) = differences(one, other[None]), differences(other, one[None])
    assert there == back
    return there


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
    assert alike(*[scene(seed) for seed in range(20)], edit(scene(7))) == [(7, 20)]


def test_images_of_one_colour_are_alike_only_in_that_colour() -> None:
    flat = [Image.new("RGB", (50, 50), colour) for colour in ("red", "blue", "red")]
    assert alike(*flat) == [(0, 2)]


def test_a_jpeg_that_is_compressed_again_is_alike(tmp_path) -> None:
    (tmp_path / "again.jpg").write_bytes(encoded(scene(3), quality=20))
    assert alike(scene(3), Image.open(tmp_path / "again.jpg").convert("RGB")) == [(0, 1)]


def test_hashes_that_differ_in_few_bits_are_found_wherever_these_are() -> None:
    draw = random.Random(0)
    hashes = [draw.getrandbits(64) for _ in range(40)]
    for bits in range(15):
        for number in range(4):
            flips = sum(1 << bit for bit in draw.sample(range(64), bits))
            hashes.append(hashes[number] ^ flips)
    close = [
        (one, other)
        for one in range(len(hashes))
        for other in range(one + 1, len(hashes))
        if (hashes[one] ^ hashes[other]).bit_count() <= copies.MAX_BITS
    ]
    assert len(close) > 50
    found = find_similar(hashes, [bytes(12)] * len(hashes))
    assert groups(found) == groups(close)


def test_many_images_that_are_all_alike_are_each_compared_once() -> None:
    assert find_similar([5] * 1000, [bytes(12)] * 1000) == [(0, at) for at in range(1, 1000)]


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
    assert difference(first, second) > copies.MAX_SAME
    assert difference(first, hash_and_thumbnail(scene(1).resize((80, 60)))[1]) < copies.MAX_SAME


def cards(symmetric: bool = False) -> tuple[list[Image.Image], list[Image.Image]]:
    """One layout in forty colours, and a near copy of each."""
    draw = np.random.default_rng(3)
    drawn = []
    while len(drawn) < 40:
        paper, ink, seal = (tuple(each) for each in draw.integers(0, 256, (3, 3)).tolist())
        card = Image.new("RGB", (160, 120), paper)
        pen = ImageDraw.Draw(card)
        pen.rectangle((20, 15, 140, 105) if symmetric else (15, 10, 120, 50), fill=ink)
        pen.ellipse((40, 20, 120, 100) if symmetric else (90, 60, 140, 110), fill=seal)
        drawn.append(card)
    return drawn, [
        Image.open(io.BytesIO(encoded(card.resize((120, 90)), quality=60))).convert("RGB")
        for card in drawn
    ]


@pytest.mark.parametrize("symmetric", [False, True])
def test_near_copies_of_one_layout_in_many_colours_are_found_in_any_order(symmetric: bool) -> None:
    images = [image for pair in zip(*cards(symmetric), strict=True) for image in pair]
    contents, signatures = (
        [f"{at:03}" for at in range(len(images))],
        [signature_of(image) for image in images],
    )
    assert len({hash_and_thumbnail(image)[0] for image in images}) < 60  # many share a hash
    keys = copy_keys(contents, signatures)
    assert keys[0::2] == keys[1::2]
    assert len(set(keys)) > 20
    for seed in range(3):
        order = random.Random(seed).sample(range(len(images)), len(images))
        again = copy_keys([contents[at] for at in order], [signatures[at] for at in order])
        assert again == [keys[at] for at in order]


def test_a_copy_is_found_whichever_image_of_its_hash_comes_first() -> None:
    red, blue, blue_again = (
        hash_and_thumbnail(Image.new("RGB", (50, 50), each)) for each in ("red", "blue", "#0808f4")
    )
    for images in ([red, blue, blue_again], [blue, red, blue_again], [blue_again, blue, red]):
        hashes, thumbnails = zip(*images, strict=True)
        (pair,) = find_similar(hashes, thumbnails, same=True)
        assert images.index(red) not in pair


def test_near_copies_of_cards_are_never_on_two_sides_whatever_they_are_called(
    tmp_path: Path, empty_cache: Path
) -> None:
    sides: dict[str, dict[str, set[str]]] = {}
    for order in ("ab", "ba"):
        folder = tmp_path / order
        folder.mkdir()
        for which, some in zip(order, cards(), strict=True):
            for at, card in enumerate(some):
                number = at if order == "ab" else 99 - at
                card.save(folder / f"{which}{number:02}.png")
                (folder / f"{which}{number:02}.txt").write_text(f"card {at}")
        found = sides.setdefault(order, {})
        for split, pairs in load_data(DataConfig(source=str(folder)), 16).splits.items():
            for (caption,) in pairs.captions:
                found.setdefault(caption, set()).add(split)
    assert {len(own) for own in sides["ab"].values()} == {1}
    assert len(sides["ab"]) == 40
    assert sides["ab"] == sides["ba"]


def test_fill_bytes_before_a_marker_and_comments_leave_the_content_of_a_photo() -> None:
    photo = encoded(scene(1))
    table = photo.index(b"\xff\xdb")
    filled = photo[:table] + b"\xff\xff" + photo[table:]
    assert (
        content_of(filled) == content_of(photo) == content_of(encoded(scene(1), comment=b"words"))
    )
    assert content_of(encoded(scene(2))) != content_of(photo)
