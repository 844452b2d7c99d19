"""One pass over every image: its bytes are read once, in threads, and only a few facts of it are kept.

Images that look alike though their bytes differ (scaled, compressed again, slightly edited) are found by two tests. The
first is a hash of 64 bits from the lowest frequencies of the grey image (a DCT, as in pHash, https://www.phash.org):
alike images differ in few bits. The second compares small colour thumbnails, because a hash also agrees by chance.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image

from lapclip.data.content import content_of
from lapclip.data.decode import NO_MEMORY, decode, read_header
from lapclip.data.packed_index import digest_of
from lapclip.data.table import StoredImage
from lapclip.errors import DataError
from lapclip.machine.facts import logical_cores
from lapclip.progress import Progress

AT_ONCE = 512
"""Images handed to the threads at a time, so that progress is shown and an interrupt is heard."""


@dataclass(frozen=True)
class ImageFacts:
    """What is known of an image after the pass."""

    digest: str
    """Of its bytes."""
    size: int
    """Bytes of the file."""
    fault: str = ""
    """Why it cannot be read; then the rest is empty."""
    width: int = 0
    height: int = 0
    marks: frozenset[str] = frozenset()
    hash: int = 0
    thumbnail: bytes = b""
    content: str = ""
    """Of the image, whatever is written beside it in its file."""

    @property
    def look(self) -> str:
        """The hash and the thumbnail as one text."""
        return _as_text(self.hash, self.thumbnail)


def inspect_image(data: bytes) -> ImageFacts:
    """Everything that is to be known about an image, from its bytes."""
    digest = digest_of(data)
    try:
        header = read_header(data)
        with header.turn(LOOK_SIDE):
            decoded = decode(header, LOOK_SIDE)
    except DataError as error:
        return ImageFacts(digest, len(data), fault=error.message)
    hashed, thumbnail = hash_and_thumbnail(decoded.image)
    marks, content = decoded.marks, content_of(data)
    return ImageFacts(digest, len(data), "", decoded.width, decoded.height, marks, hashed, thumbnail, content)


def inspect_images(images: Sequence[StoredImage], progress: Progress | None = None) -> list[ImageFacts]:
    """The facts of every image, in order; those that cannot be read say why."""
    facts: list[ImageFacts] = []
    with ThreadPoolExecutor(logical_cores(), thread_name_prefix="lapclip-check") as pool:
        for at in range(0, len(images), AT_ONCE):
            facts += pool.map(_read, images[at : at + AT_ONCE])
            if progress:
                progress(len(facts), len(images))
    return facts


def _read(image: StoredImage) -> ImageFacts:
    try:
        return inspect_image(image.read())
    except MemoryError:
        return ImageFacts("", 0, fault=NO_MEMORY)
    except OSError as error:
        return ImageFacts("", 0, fault=(error.strerror or str(error) or type(error).__name__).lower())


GREY_SIDE, LOW = 32, 8
LOOK_SIDE = 2 * GREY_SIDE
"""The short side, at least, of what an image is compared by. It is the same for every model, and so are copies."""
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
CANDIDATES_AT_ONCE = 2_000_000
MOST_COMPARED = 100_000
"""Images beyond which copies are no longer looked for among all that look alike: that would take longer than reading
them. Those with the same content or the same small look are found among any number."""

_FREQUENCIES = np.cos(np.pi / GREY_SIDE * np.outer(np.arange(LOW), np.arange(GREY_SIDE) + 0.5))
_BITS = np.array([bin(value).count("1") for value in range(65536)], dtype=np.uint8)
_FLIPS = np.array(sorted({1 << a | 1 << b for a in range(16) for b in range(16)} | {0}), dtype=np.uint16)
"""What two bands differ by where they differ in at most two bits."""


def hash_and_thumbnail(image: Image.Image) -> tuple[int, bytes]:
    """The hash of an image and its thumbnail."""
    thumbnail = image.resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX).tobytes()
    grey = np.asarray(image.convert("L").resize((GREY_SIDE, GREY_SIDE), Image.Resampling.BOX), dtype=np.float64)
    low = np.round(_FREQUENCIES @ grey @ _FREQUENCIES.T, 3).ravel()  # the same on every processor
    low[0] = 0  # brightness says nothing about what is on the image
    bits = low > np.median(low)
    return int.from_bytes(np.packbits(bits).tobytes(), "big"), thumbnail


def look_of(image: Image.Image) -> str:
    """The hash and the thumbnail of an image as one text."""
    return _as_text(*hash_and_thumbnail(image))


def _as_text(hashed: int, thumbnail: bytes) -> str:
    return base64.b85encode(hashed.to_bytes(8, "big") + thumbnail).decode("ascii")


def copy_keys(contents: Sequence[str], looks: Sequence[str]) -> list[str]:
    """A text for each image that its copies share and no other image has: the smallest content among them.

    Copies have the same content, or look the same: compressed again, resized or slightly edited. That goes on from copy
    to copy. So an image's key changes only where a copy is added, changed or removed.
    """
    pairs: list[tuple[int, int]] = []
    for features in (contents, looks):
        first: dict[str, int] = {}
        pairs += [(first[feature], at) for at, feature in enumerate(features) if first.setdefault(feature, at) != at]
    different = sorted({look: at for at, look in reversed(list(enumerate(looks)))}.values())
    if len(different) <= MOST_COMPARED:
        raw = [base64.b85decode(looks[at]) for at in different]
        similar = find_similar([int.from_bytes(each[:8], "big") for each in raw], [each[8:] for each in raw])
        pairs += [(different[one], different[other]) for one, other, apart in similar if apart <= SAME]
    keys = list(contents)
    for members in groups(pairs):
        smallest = min(contents[at] for at in members)
        for at in members:
            keys[at] = smallest
    return keys


def find_similar(hashes: Sequence[int], thumbnails: Sequence[bytes]) -> list[tuple[int, int, float]]:
    """Pairs of images that look alike, as indices, the smaller first, and how much they differ.

    Of many images with one hash, each is compared with the first only.
    """
    if len(hashes) < 2:
        return []
    different, first, inverse = np.unique(np.array(hashes, dtype=np.uint64), return_index=True, return_inverse=True)
    pairs = {(int(first[group]), at) for at, group in enumerate(inverse.reshape(-1)) if first[group] != at}
    for rows, others in _close(different):
        close = zip(first[rows].tolist(), first[others].tolist(), strict=True)
        pairs |= {(min(pair), max(pair)) for pair in close}
    found = []
    for one, other in sorted(pairs):
        apart = difference(thumbnails[one], thumbnails[other])
        if apart <= SAME or (apart <= ALIKE and mean_difference(thumbnails[one], thumbnails[other]) <= MEAN):
            found.append((one, other, apart))
    return found


def mean_difference(first: bytes, second: bytes) -> float:
    """By how much two thumbnails differ in the mean."""
    one, other = (np.frombuffer(each, dtype=np.uint8).astype(np.float32) for each in (first, second))
    return float(np.abs(one - other).mean())


def difference(first: bytes, second: bytes) -> float:
    """By how much two thumbnails differ where they differ most, brightness and contrast aside.

    The largest differences count, not the mean: another thing before the same background is another image.
    """
    one = np.frombuffer(first, dtype=np.uint8).astype(np.float32)
    other = np.frombuffer(second, dtype=np.uint8).astype(np.float32)
    level, gain = one.mean(), 1.0
    if one.std() > 1:
        gain = float(np.clip(((one - level) * (other - other.mean())).mean() / one.var(), *GAINS))
    left = np.abs(gain * (one - level) + np.clip(other.mean(), level - SHIFT, level + SHIFT) - other)
    return float(np.percentile(left.reshape(-1, 3).max(axis=1), 95))


def _close(hashes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Indices of pairs of different hashes that differ in few bits; a pair may come more than once."""
    bands = hashes.view(np.uint16).reshape(-1, 4)
    for band in bands.T:
        order = np.argsort(band, kind="stable")
        sorted_band = band[order]
        for flip in _FLIPS:
            flipped = band ^ flip
            low, high = np.searchsorted(sorted_band, flipped, "left"), np.searchsorted(sorted_band, flipped, "right")
            counts = high - low
            ends = np.cumsum(counts)
            start = 0
            while start < len(counts):
                base = ends[start - 1] if start else 0
                stop = max(start + 1, int(np.searchsorted(ends, base + CANDIDATES_AT_ONCE, "right")))
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
