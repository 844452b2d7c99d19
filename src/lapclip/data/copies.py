"""Copies of one image, exact or near, so that all of them can be on one side of a split.

Programs write captions, ratings and dates into image files, so copies of one image seldom have the same bytes. So only
what the pixels are made from identifies it, as it is stored: decoded pixels differ by a step between releases of a
decoder, and splits that are drawn from them would then differ between two computers.

Near copies (scaled, compressed again, slightly edited) are found by two tests. The first is a hash of 64 bits from the
lowest frequencies of the grey image (a DCT, as in pHash, https://www.phash.org): near copies differ in few bits. The
second compares small colour thumbnails, because a hash also agrees by chance, and for one layout in any colour. Both
together are the signature of an image.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from lapclip.paths import digest_of_json, read_json, write_atomic

PNG = b"\x89PNG\r\n\x1a\n"
PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT")
SCAN = 0xDA
"""The marker of a JPEG after which its pixels come."""
GREY_SIDE, LOW = 32, 8
LEAST, LEAST_SHARE = 40.0, 0.01
"""How far above the median a frequency must be to count, and as a share of the strongest. A logo has no part in half of
them because it is symmetric, and what compression leaves there is noise."""
SIGNATURE_VERSION = 2
"""Raise it with every change that gives some image another signature or content: all are then inspected anew."""
SIGNATURE_SIDE = 2 * GREY_SIDE
"""The short side, at least, of what a signature is made from. It is the same for every model, and so are copies."""
THUMBNAIL_SIDE = 12
MOST_BITS = 12
"""Bits in which the hashes of alike images may differ. Of four bands of 16 bits at least one then differs in at most
two bits, unless each differs in three: that is how pairs are found without comparing all with all."""
SAME = 28.0
"""Difference, of 255, up to which two images are called the same image: above that of a photo compressed again,
halved or squeezed, below that of drawn scenes with another thing before the same background."""
ALIKE, MEAN = 55.0, 20.0
"""Difference and mean difference up to which two images are called alike, as two photos of one scene are, a moment
apart: where something moved they differ much, in the mean little."""
GAINS, SHIFT = (0.67, 1.5), 40.0
"""Changes of contrast and of brightness that leave an image the same."""
MOST_TINT = SHIFT + SAME
"""Difference of the mean red, green or blue beyond which images are not compared any further: thousands may share a
hash, and what differs more is hardly ever found the same."""
COUNTED = 0.95
"""Share of a thumbnail that counts: what differs more, in the rest, is noise or a mark."""
CANDIDATES_AT_ONCE = 2_000_000
THUMBNAILS_AT_ONCE = 2_000
MOST_COMPARED = 100_000
"""Different signatures beyond which they are no longer compared: that would take longer than reading the images. Those
with the same content or the same signature are found among any number."""
KEYS, KEYS_VERSION = "copies.json", 1
"""The file that remembers keys. Raise the version with every change that finds other copies in the same signatures."""

_FREQUENCIES = np.cos(np.pi / GREY_SIDE * np.outer(np.arange(LOW), np.arange(GREY_SIDE) + 0.5))
_BITS = np.array([bin(value).count("1") for value in range(65536)], dtype=np.uint8)
_FLIPS = np.array(
    sorted({1 << a | 1 << b for a in range(16) for b in range(16)} | {0}), dtype=np.uint16
)
"""What two bands differ by where they differ in at most two bits."""


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
    grey = np.asarray(
        image.convert("L").resize((GREY_SIDE, GREY_SIDE), Image.Resampling.BOX), dtype=np.float64
    )
    low = np.round(_FREQUENCIES @ grey @ _FREQUENCIES.T, 3).ravel()  # the same on every processor
    low[0] = 0  # brightness says nothing about what is on the image
    bits = low > np.median(low) + max(LEAST, LEAST_SHARE * np.abs(low).max())
    return int.from_bytes(np.packbits(bits).tobytes(), "big"), thumbnail


def signature_of(image: Image.Image) -> str:
    """What an image is compared with others by."""
    return signature_text(*hash_and_thumbnail(image))


def signature_text(hashed: int, thumbnail: bytes) -> str:
    """A hash and a thumbnail as one text."""
    return base64.b85encode(hashed.to_bytes(8, "big") + thumbnail).decode("ascii")


def copy_keys(
    contents: Sequence[str], signatures: Sequence[str], folder: Path | None = None
) -> list[str]:
    """A text for each image that its copies share and no other image has: the smallest content among them.

    Copies have the same content, or signatures that are the same or differ little: compressed again, resized or
    slightly edited. That goes on from copy to copy. So an image's key changes only where a copy is added, changed or
    removed, and does not depend on the order. A folder remembers the keys of the images they were last found for.
    """
    if folder is None:
        keys = _find_keys(contents, signatures)
    else:
        images = digest_of_json(sorted({*zip(contents, signatures, strict=True)}))
        keys = _remembered(folder / KEYS, images)
        if keys is None:
            keys = _find_keys(contents, signatures)
            text = json.dumps({"version": KEYS_VERSION, "images": images, "keys": keys})
            with suppress(OSError):  # then they are found anew next time
                write_atomic(folder / KEYS, text)
    return [keys.get(content, content) for content in contents]


def _remembered(path: Path, images: str) -> dict[str, str] | None:
    try:
        found = read_json(path)
        if (found["version"], found["images"]) != (KEYS_VERSION, images):
            return None
        return {str(content): str(key) for content, key in found["keys"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none there, or damaged
        return None


def _find_keys(contents: Sequence[str], signatures: Sequence[str]) -> Mapping[str, str]:
    """The key of each content that has a smaller one among its copies."""
    pairs: list[tuple[int, int]] = []
    for features in (contents, signatures):
        first: dict[str, int] = {}
        pairs += [
            (first[feature], at)
            for at, feature in enumerate(features)
            if first.setdefault(feature, at) != at
        ]
    different = list({signature: at for at, signature in enumerate(signatures)}.values())
    if len(different) <= MOST_COMPARED:
        raw = [base64.b85decode(signatures[at]) for at in different]
        hashes, thumbnails = (
            [int.from_bytes(each[:8], "big") for each in raw],
            [each[8:] for each in raw],
        )
        pairs += [
            (different[one], different[other])
            for one, other in find_similar(hashes, thumbnails, same=True)
        ]
    keys: dict[str, str] = {}
    for members in groups(pairs):
        copies = {contents[at] for at in members}
        smallest = min(copies)
        keys.update((content, smallest) for content in copies if content != smallest)
    return keys


def find_similar(
    hashes: Sequence[int], thumbnails: Sequence[bytes], *, same: bool = False
) -> list[tuple[int, int]]:
    """Pairs of images that are alike or, with `same`, the same image; as indices, the smaller first.

    Not all pairs, but enough that `groups` of them are those of all pairs, whatever the order of the images. What was
    found is compared with the rest only, so that many that are all alike do not take the square of their number.
    """
    if len(hashes) < 2:
        return []
    different, hash_of = np.unique(np.array(hashes, dtype=np.uint64), return_inverse=True)
    hash_of = hash_of.reshape(-1)
    unseen = np.bincount(hash_of)
    by_hash = np.split(np.argsort(hash_of, kind="stable"), np.cumsum(unseen)[:-1])
    near = _near(different)
    colours = np.frombuffer(b"".join(thumbnails), dtype=np.uint8).reshape(len(hashes), -1, 3)
    tints = colours.mean(axis=1)
    new = np.ones(len(hashes), dtype=bool)
    pairs: list[tuple[int, int]] = []
    for start in range(len(hashes)):
        waiting = [start] if new[start] else []
        while waiting:
            at = waiting.pop()
            if new[at]:  # the first of its group
                new[at] = False
                unseen[hash_of[at]] -= 1
            some = near[hash_of[at]]
            some = some[unseen[some] > 0]
            if not len(some):
                continue
            others = np.concatenate([by_hash[each] for each in some])
            others = others[new[others]]
            others = others[(np.abs(tints[others] - tints[at]) <= MOST_TINT).all(axis=1)]
            found = others[_are_alike(colours[at], colours[others], same)]
            new[found] = False
            np.subtract.at(unseen, hash_of[found], 1)
            waiting += found.tolist()
            pairs += [(min(at, other), max(at, other)) for other in found.tolist()]
    return sorted(pairs)


def _are_alike(one: np.ndarray, others: np.ndarray, same: bool) -> np.ndarray:
    """Whether each of some thumbnails is alike, or the same."""
    found = np.zeros(len(others), dtype=bool)
    for at in range(0, len(others), THUMBNAILS_AT_ONCE):
        some = others[at : at + THUMBNAILS_AT_ONCE]
        apart = differences(one, some, SAME if same else ALIKE)
        found[at : at + len(some)] = apart <= SAME
        if not same:
            mean = np.abs(some.astype(np.float32) - one).mean(axis=(1, 2))
            found[at : at + len(some)] |= (apart <= ALIKE) & (mean <= MEAN)
    return found


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


def _near(hashes: np.ndarray) -> list[np.ndarray]:
    """For each of some different hashes those that differ from it in few bits, itself among them."""
    own, count = np.arange(len(hashes)), len(hashes)
    found = [own * count + own]
    for rows, others in close_hashes(hashes):
        found += [rows * count + others, others * count + rows] if len(rows) else []
    pairs = np.unique(np.concatenate(found))
    return np.split(pairs % count, np.searchsorted(pairs, own[1:] * count))


def close_hashes(hashes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Indices of pairs of different hashes that differ in few bits; a pair may come more than once."""
    bands = hashes.view(np.uint16).reshape(-1, 4)
    for band in bands.T:
        order = np.argsort(band, kind="stable")
        begins = np.searchsorted(band[order], np.arange(65537))
        for flip in _FLIPS:
            flipped = band ^ flip
            low = begins[flipped]
            counts = begins[flipped.astype(np.int64) + 1] - low
            ends = np.cumsum(counts)
            start = 0
            while start < len(counts):
                base = ends[start - 1] if start else 0
                stop = max(
                    start + 1, int(np.searchsorted(ends, base + CANDIDATES_AT_ONCE, "right"))
                )
                some = counts[start:stop]
                rows = np.repeat(np.arange(start, stop), some)
                steps = np.arange(len(rows)) - np.repeat(ends[start:stop] - some - base, some)
                others = order[np.repeat(low[start:stop], some) + steps]
                once = rows < others
                rows, others = rows[once], others[once]
                apart = _BITS[(bands[rows] ^ bands[others])].sum(axis=1, dtype=np.int64)
                close = apart <= MOST_BITS
                yield rows[close], others[close]
                start = stop


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
