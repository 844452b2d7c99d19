"""How large the frames in an AVIF are, from the frames themselves: the box around them may say less, and is believed
by nobody while memory is taken for them.

After "AV1 Image File Format", ISO/IEC 14496-12 (boxes) and section 5.5 of the AV1 specification (sequence headers).
"""

from __future__ import annotations

from collections.abc import Iterator

MOST_PARTS = 10_000
"""Parts that are inspected: real images have a handful, and four a tile where they are made of tiles."""
SEQUENCE_HEADER = 1
FIRST_CHUNKS = {b"stco": 4, b"co64": 8}
"""Boxes that say where the frames of an animation are, and the bytes of a place in them."""
CONTAINERS = {b"moov": 0, b"trak": 0, b"mdia": 0, b"minf": 0, b"stbl": 0, b"meta": 4}
"""Boxes of boxes, and how many bytes come before these."""


def av1_sizes(data: bytes) -> list[tuple[int, int]]:
    """The width and height of every sequence header. Raises ValueError or IndexError where the file is damaged."""
    found, left = [], MOST_PARTS
    for stream in _streams(data):
        for kind, part in _parts(stream):
            left -= 1
            if left < 0:
                raise ValueError("it has more parts than an image")
            if kind == SEQUENCE_HEADER:
                found.append(_frame_size(_Bits(part)))
    return found


def _streams(data: bytes) -> Iterator[bytes]:
    """What is handed to a decoder: each item of an image, and the beginning of each track of an animation."""
    boxes = dict[bytes, list[tuple[int, int]]]()
    for kind, start, end in _boxes(data, 0, len(data)):
        boxes.setdefault(kind, []).append((start, end))
    inside = boxes.get(b"idat", [(0, 0)])[0][0]
    for start, end in boxes.get(b"iloc", []):
        yield from _items(data, data[start:end], inside)
    for kind, width in FIRST_CHUNKS.items():
        for start, _ in boxes.get(kind, []):
            first = int.from_bytes(data[start + 8 : start + 8 + width], "big")
            yield data[first : first + 100_000]


def _boxes(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Boxes, and those inside: their kind, and where their content begins and ends."""
    while at + 8 <= end:
        size, kind, start = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8], at + 8
        if size == 1:
            size, start = int.from_bytes(data[at + 8 : at + 16], "big"), at + 16
        stop = min(end, at + size) if size else end
        if stop < start:
            raise ValueError("a box ends before it begins")
        if kind in CONTAINERS:
            yield from _boxes(data, start + CONTAINERS[kind], stop)
        else:
            yield kind, start, stop
        at = stop


def _items(data: bytes, box: bytes, inside: int) -> Iterator[bytes]:
    """The bytes of each item, which may lie in pieces; `inside` is where the box for small ones begins."""
    bits = _Bits(box)
    version = bits.take(8)
    bits.take(24)
    offset_bits, length_bits, base_bits, index_bits = (8 * bits.take(4) for _ in range(4))
    left = 2 * len(data)
    for _ in range(bits.take(32 if version == 2 else 16)):
        bits.take(32 if version == 2 else 16)
        in_idat = version > 0 and bits.take(16) & 15 == 1
        bits.take(16)
        base, pieces = bits.take(base_bits) + (inside if in_idat else 0), []
        for _ in range(bits.take(16)):
            bits.take(index_bits if version > 0 else 0)
            start = base + bits.take(offset_bits)
            length = bits.take(length_bits) or len(data)
            pieces.append(data[start : start + length])
            left -= len(pieces[-1])
            if left < 0:
                raise ValueError("its items lie in each other")
        yield b"".join(pieces)


def _parts(stream: bytes) -> Iterator[tuple[int, bytes]]:
    """The units ("OBU") of a stream, by their kind, up to what is none."""
    at = 0
    while at < len(stream) and not stream[at] & 0x81:
        kind, extended, has_size = stream[at] >> 3, stream[at] & 4, stream[at] & 2
        at += 2 if extended else 1
        size = len(stream) - at
        if has_size:
            size, digits = 0, stream[at : at + 8]
            for shift, byte in enumerate(digits):
                size, at = size | (byte & 127) << 7 * shift, at + 1
                if byte < 128:
                    break
        yield kind, stream[at : at + size]
        at += size


class _Bits:
    """Whole numbers of any count of bits, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> int:
        first, self._at = self._at, self._at + count
        if self._at > 8 * len(self._data):
            raise IndexError("it ends early")
        whole = int.from_bytes(self._data[first // 8 : -(-self._at // 8)], "big")
        return whole >> -self._at % 8 & (1 << count) - 1


def _frame_size(bits: _Bits) -> tuple[int, int]:
    """Of the largest frame that a sequence header allows."""
    bits.take(4)
    if bits.take(1):  # a still image, whose header is short
        bits.take(5)
    else:
        _skip_timing(bits)
    across, down = bits.take(4) + 1, bits.take(4) + 1
    return bits.take(across) + 1, bits.take(down) + 1


def _skip_timing(bits: _Bits) -> None:
    """What is said about time and buffers between the beginning of a sequence header and the size."""
    delay = 0
    if bits.take(1):
        bits.take(64)
        if bits.take(1):
            zeros = 0
            while not bits.take(1):
                zeros += 1
            bits.take(zeros)
        if bits.take(1):
            delay = bits.take(5) + 1
            bits.take(42)
    shown_late = bits.take(1)
    for _ in range(bits.take(5) + 1):
        bits.take(12)
        if bits.take(5) > 7:
            bits.take(1)
        if delay and bits.take(1):
            bits.take(2 * delay + 1)
        if shown_late and bits.take(1):
            bits.take(4)
