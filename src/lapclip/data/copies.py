"""Copies of one image, exact or near, so that all of them can be on one side of a split.

Programs write captions, ratings and dates into image files, so copies of one image seldom have the same bytes. So only
what the pixels are made from identifies it, as it is stored: decoded pixels differ by a step between releases of a
decoder, and splits that are drawn from them would then differ between two computers.

Near copies (scaled, compressed again, slightly edited) are found by two tests. The first is a hash of 64 bits from the
lowest frequencies of the gray image (a DCT, as in pHash, https://www.phash.org): near copies differ in few bits. The
second compares small colour thumbnails, because a hash also agrees by chance, and for one layout in any colour. Both
together are the signature of an image.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

PNG = b"\x89PNG\r\n\x1a\n"
PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT")
SCAN = 0xDA  # the marker of a JPEG after which its pixels come

SIGNATURE_VERSION = 2
"""Raise it with every change that gives some image another signature or content: all are then inspected anew."""
GRAY_SIDE, LOW = (
    32,
    8,
)  # pixels that a hash is made from, and frequencies across and down that it keeps
# How far above the median a frequency must be to count, and as a share of the strongest. A symmetric logo has no part
# in half of the frequencies, and what compression leaves there is noise.
MIN_ABOVE_MEDIAN, MIN_SHARE_OF_STRONGEST = 40.0, 0.01
SIGNATURE_SIDE = (
    2 * GRAY_SIDE
)  # the least short side of what a signature is made from, the same for every model
THUMBNAIL_SIDE = 12
THUMBNAILS_AT_ONCE = 2_000

MAX_BITS = 12  # in which the hashes of images that look alike may differ
# Differences of 255 up to which two images show the same: above that of a photo compressed again, halved or squeezed,
# below that of drawn scenes with another thing before the same background.
MAX_SAME = 28.0
# Difference and mean difference up to which images look alike, as two photos of one scene do, a moment apart: where
# something moved they differ much, in the mean little.
MAX_ALIKE, MAX_ALIKE_MEAN = 55.0, 20.0
GAINS, SHIFT = (
    (0.67, 1.5),
    40.0,
)  # changes of contrast and of brightness that leave an image the same
MAX_TINT = SHIFT + MAX_SAME  # difference of mean colors beyond which thumbnails are not compared
COUNTED = (
    0.95  # share of a thumbnail that counts: what differs more, in the rest, is noise or a mark
)
# Different signatures beyond which they are not compared: that would take longer than reading the images.
MAX_COMPARED = 100_000

_FREQUENCIES = np.cos(np.pi / GRAY_SIDE * np.outer(np.arange(LOW), np.arange(GRAY_SIDE) + 0.5))


def content_of(data: bytes) -> str:
    """The first half of the SHA-256 of an image's stored pixels. Of a form whose parts are not known here, and of a
    damaged file, all bytes count."""
    digest = hashlib.sha256()
    for part in _png_pixels(data) or _jpeg_pixels(data) or [data]:
        digest.update(part)
    return digest.hexdigest()[:32]


def _png_pixels(data: bytes) -> list[memoryview]:
    """The chunks of a PNG that hold pixels; none where it is no whole PNG."""
    if not data.startswith(PNG):
        return []
    view, at, found = memoryview(data), len(PNG), []
    while at + 12 <= len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind in PIXEL_CHUNKS:
            found.append(view[at + 4 : at + 8 + size])
        at += 12 + size
        if kind == b"IEND":
            return found
    return []


def _jpeg_pixels(data: bytes) -> list[memoryview]:
    """The segments of a JPEG from which pixels are made; none where it is no JPEG."""
    if not data.startswith(b"\xff\xd8"):
        return []
    view, found = memoryview(data), []
    for marker, begin, end in jpeg_segments(data):
        if not (0xE0 <= marker <= 0xEF or marker == 0xFE):  # notes of applications, and comments
            found.append(view[begin:end])
        if marker == SCAN:
            return found
    return []


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """The segments of a JPEG, each with its marker, where it begins and where it ends; the last is its first scan with
    all that follows. Where they cannot be told any further, they end before."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # any number of them may come before a marker
            at += 1
            continue
        if marker == SCAN:
            yield marker, at, len(data)
            return
        alone = marker == 0x01 or 0xD0 <= marker <= 0xD8
        end = at + 2 + (0 if alone else int.from_bytes(data[at + 2 : at + 4], "big"))
        yield marker, at, end
        at = end


def hash_and_thumbnail(image: Image.Image) -> tuple[int, bytes]:
    """The hash of an image and its thumbnail."""
    thumbnail = image.resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX).tobytes()
    gray = np.asarray(
        image.convert("L").resize((GRAY_SIDE, GRAY_SIDE), Image.Resampling.BOX), dtype=np.float64
    )
    low = np.round(_FREQUENCIES @ gray @ _FREQUENCIES.T, 3).ravel()  # the same on every processor
    low[0] = 0  # brightness says nothing about what is on the image
    bits = low > np.median(low) + max(MIN_ABOVE_MEDIAN, MIN_SHARE_OF_STRONGEST * np.abs(low).max())
    return int.from_bytes(np.packbits(bits).tobytes(), "big"), thumbnail


def signature_of(image: Image.Image) -> str:
    """What an image is compared with others by."""
    return signature_text(*hash_and_thumbnail(image))


def signature_text(hashed: int, thumbnail: bytes) -> str:
    """A hash and a thumbnail as one text."""
    return base64.b85encode(hashed.to_bytes(8, "big") + thumbnail).decode("ascii")


def copy_keys(contents: Sequence[str], signatures: Sequence[str]) -> list[str]:
    """Return a text for each image that its copies share and no other image has: the smallest content among them.

    Copies have the same content, or signatures that are equal or differ little: compressed again, resized or slightly
    edited. That goes on from copy to copy. So the key of an image changes only if a copy of it is added, changed or
    removed, and does not depend on the order of the images.
    """
    pairs = [*equal_pairs(contents), *equal_pairs(signatures)]
    last_image = {signature: image for image, signature in enumerate(signatures)}
    different = list(last_image.values())
    if len(different) <= MAX_COMPARED:
        raw = [base64.b85decode(signatures[image]) for image in different]
        hashes = [int.from_bytes(each[:8], "big") for each in raw]
        thumbnails = [each[8:] for each in raw]
        for one, other in find_similar(hashes, thumbnails, same=True):
            pairs.append((different[one], different[other]))
    keys = {}
    for members in groups(pairs):
        smallest = min(contents[image] for image in members)
        keys.update((contents[image], smallest) for image in members)
    return [keys.get(content, content) for content in contents]


def equal_pairs(values: Sequence[str]) -> list[tuple[int, int]]:
    """Return each value's first position with each of its later ones."""
    first: dict[str, int] = {}
    pairs = []
    for position, value in enumerate(values):
        if first.setdefault(value, position) != position:
            pairs.append((first[value], position))
    return pairs


def find_similar(
    hashes: Sequence[int], thumbnails: Sequence[bytes], *, same: bool = False
) -> list[tuple[int, int]]:
    """Return pairs of images that look alike or, with `same`, show the same; as indices, the smaller first.

    Not all pairs, but enough that `groups` of them are those of all pairs, whatever the order of the images. An image
    that was found is not compared again, so many that are all alike do not take the square of their number.
    """
    if len(hashes) < 2:
        return []
    hash_values = np.array(hashes, dtype=np.uint64)
    colors = np.frombuffer(b"".join(thumbnails), dtype=np.uint8).reshape(len(hashes), -1, 3)
    tints = colors.mean(axis=1)
    is_new = np.ones(len(hashes), dtype=bool)
    pairs: list[tuple[int, int]] = []
    for first in range(len(hashes)):
        pending = [first] if is_new[first] else []
        is_new[first] = False
        while pending:
            image = pending.pop()
            different_bits = np.bitwise_count(hash_values ^ hash_values[image])
            others = np.flatnonzero(is_new & (different_bits <= MAX_BITS))
            others = others[(np.abs(tints[others] - tints[image]) <= MAX_TINT).all(axis=1)]
            found = others[are_alike(colors[image], colors[others], same)]
            is_new[found] = False
            pending += found.tolist()
            pairs += [(min(image, other), max(image, other)) for other in found.tolist()]
    return sorted(pairs)


def are_alike(one: np.ndarray, others: np.ndarray, same: bool) -> np.ndarray:
    """Return whether each of some thumbnails looks like one, or shows the same with `same`."""
    alike = np.zeros(len(others), dtype=bool)
    for start in range(0, len(others), THUMBNAILS_AT_ONCE):
        part = others[start : start + THUMBNAILS_AT_ONCE]
        difference = differences(one, part, MAX_SAME if same else MAX_ALIKE)
        is_alike = difference <= MAX_SAME
        if not same:
            mean = np.abs(part.astype(np.float32) - one).mean(axis=(1, 2))
            is_alike |= (difference <= MAX_ALIKE) & (mean <= MAX_ALIKE_MEAN)
        alike[start : start + len(part)] = is_alike
    return alike


def differences(one: np.ndarray, others: np.ndarray, most: float = 255.0) -> np.ndarray:
    """By how much a thumbnail and each of some others differ where they differ most, brightness and contrast aside:
    the smaller of the two ways to make one of the other, so that it does not matter which of them comes first.

    The largest differences count, not the mean: another thing before the same background is another image. What
    differs by far more than `most` may come out as infinite.
    """
    size = one.size
    first, second = (each.reshape(-1, size).astype(np.float64) for each in (one, others))
    # Sums of whole numbers, which are exact whatever their order: else another processor could find other copies.
    levels = [each.sum(axis=1) / size for each in (first, second)]
    spreads = [
        (each**2).sum(axis=1) / size - level**2
        for each, level in zip((first, second), levels, strict=True)
    ]
    common = second @ first[0] / size - levels[0] * levels[1]
    apart = np.full(len(second), np.inf)
    for source, target in ((0, 1), (1, 0)):
        spread = spreads[source]
        gain = np.where(spread > 1, np.clip(common / np.maximum(spread, 1), *GAINS), 1.0)
        level = np.clip(levels[target], levels[source] - SHIFT, levels[source] + SHIFT)
        square = (
            spreads[target] - 2 * gain * common + gain**2 * spread + (level - levels[target]) ** 2
        )
        near = np.flatnonzero(square <= most**2 + (1 - COUNTED) * 255**2)  # cheap, and most are not
        both = [np.broadcast_to(each, second.shape)[near] for each in (first, second)]
        shift = level - gain * levels[source]
        left = np.abs(gain[near, None] * both[source] + shift[near, None] - both[target])
        worst = np.maximum(np.maximum(left[:, 0::3], left[:, 1::3]), left[:, 2::3])
        if len(near):
            apart[near] = np.minimum(apart[near], np.quantile(worst, COUNTED, axis=1))
    return apart


def groups(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Images that are alike, directly or through others, in groups."""
    leader: dict[int, int] = {}

    def find(member: int) -> int:
        while leader.setdefault(member, member) != member:
            leader[member] = member = leader[leader[member]]
        return member

    for first, second in pairs:
        leader[max(find(first), find(second))] = min(find(first), find(second))
    found: dict[int, list[int]] = {}
    for member in sorted(leader):
        found.setdefault(find(member), []).append(member)
    return list(found.values())
