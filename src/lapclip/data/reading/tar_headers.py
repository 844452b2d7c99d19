"""The table of contents of a tar file, from its headers alone: names, offsets and sizes. Nothing is ever extracted.

Our own reader, because it can promise to go forwards only: a damaged or hostile header ends the reading, with its
offset, instead of leading it in a circle. Format: POSIX ustar and pax (IEEE Std 1003.1-2017), and GNU's long names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512
LONGEST_EXTENSION = 1 << 20
"""Bytes of a long name or of pax fields that are believed."""
LONGEST_PADDING = 1 << 16
"""Bytes of zeros at the end that are believed: programs fill up records of 20 blocks, and a few of them larger ones."""


class Damaged(Exception):
    """From some offset on the file is no tar; what came before can be used."""


@dataclass(frozen=True, slots=True)
class Member:
    """A plain file in a tar, or something else that is not read, with the reason."""

    name: str
    offset: int
    size: int
    why_not: str = ""


_OTHER = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe",
          b"S": "a sparse file"}  # fmt: skip


def members(path: Path) -> Iterator[Member]:
    """The members of a tar in order, folders left out. Raises Damaged where the file cannot be read on."""
    end = os.stat(path).st_size
    with open(path, "rb") as file:
        offset, long_name, long_size = 0, None, None
        while offset + BLOCK <= end:
            file.seek(offset)
            header = file.read(BLOCK)
            if not header.strip(b"\0"):
                # An end mark; but a shard with a hole, a filled-up download and two shards in one file have zeros too.
                if end - offset > LONGEST_PADDING or file.read(LONGEST_PADDING).strip(b"\0"):
                    raise Damaged(f"zeros at byte {offset:,}, and then not the end")
                return
            if len(header) < BLOCK or not _sum_is_right(header):
                raise Damaged(f"no header at byte {offset:,}")
            kind, size = header[156:157], _number(header[124:136])
            if size is None:
                raise Damaged(f"no size at byte {offset:,}")
            body = offset + BLOCK
            if kind in b"LKxXg":
                if size > LONGEST_EXTENSION or body + size > end:
                    raise Damaged(f"a header at byte {offset:,} that is too long")
                content = file.read(size)
                if kind == b"L":
                    long_name = content.split(b"\0")[0]
                elif kind in b"xX":
                    fields = _pax(content)
                    long_name = fields.get(b"path", long_name)
                    long_size = _decimal(fields.get(b"size"))
                offset = body + _padded(size)
                continue
            size = size if long_size is None else long_size
            raw = long_name if long_name is not None else _short_name(header)
            long_name = long_size = None
            name = raw.decode("utf-8", "surrogateescape")
            if kind in _OTHER:
                yield Member(name, body, 0, _OTHER[kind])
                offset = body + (_padded(size) if kind == b"S" else 0)
                continue
            if kind != b"5":
                if body + size > end:
                    yield Member(name, body, size, "the file ends before it does")
                    return
                yield Member(name, body, size)
            offset = body + _padded(size)
        if offset < end or offset == 0:
            raise Damaged(f"the end is missing at byte {offset:,}")


def _padded(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK * BLOCK


def _sum_is_right(header: bytes) -> bool:
    """The sum of all bytes, its own eight taken as spaces."""
    stated = _number(header[148:156])
    return stated == sum(header) - sum(header[148:156]) + 8 * 32


def _number(field: bytes) -> int | None:
    """A number in octal digits or, after a set first bit, in bytes; never negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    return _decimal(field.strip(b" \0"), 8)


def _decimal(field: bytes | None, base: int = 10) -> int | None:
    if field is None or len(field) > 20:
        return None
    if not field:
        return 0
    return int(field, base) if field.isdigit() and (base == 10 or not field.strip(b"01234567")) else None


def _short_name(header: bytes) -> bytes:
    name = header[:100].split(b"\0")[0]
    prefix = header[345:500].split(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax(content: bytes) -> dict[bytes, bytes]:
    """Lines of length, name and value: `21 path=some/name.jpg`."""
    fields: dict[bytes, bytes] = {}
    while content:
        length = _decimal(content.split(b" ", 1)[0])
        if not length or length > len(content):
            break
        name, _, value = content[:length].partition(b" ")[2].rstrip(b"\n").partition(b"=")
        fields[name] = value
        content = content[length:]
    return fields
