"""What an index said when a pass over its folder began, beside what lies in the folder now.

Both are tables of SQLite's own temporary files: a million images would take more memory than the model. The index
changes while the pass goes on; these do not, so that a chain of renamed files is followed as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from lapclip.searching.index import COLUMNS, Entry, Index, entry_of
from lapclip.searching.scan import Stamp

PAGE = 5000
"""Rows at once."""
TABLES = f"""
DROP TABLE IF EXISTS temp.walked;
DROP TABLE IF EXISTS temp.old;
CREATE TEMP TABLE walked (path BLOB PRIMARY KEY, bytes INTEGER, modified INTEGER) WITHOUT ROWID;
CREATE TEMP TABLE old AS SELECT {COLUMNS}, gone AS free FROM main.pictures;
CREATE UNIQUE INDEX temp.old_numbers ON old (number);
CREATE UNIQUE INDEX temp.old_paths ON old (path);
CREATE INDEX temp.old_digests ON old (digest);
"""
TO_READ = """
FROM walked LEFT JOIN old ON old.path = walked.path
WHERE (old.number IS NULL OR old.gone OR old.bytes != walked.bytes OR old.modified != walked.modified
       OR (old.row IS NULL AND old.reason IS NULL))
"""
"""Files that are new, changed, or have neither a vector nor a reason why not."""


class Known(NamedTuple):
    """What the index has for the bytes of a file."""

    entry: Entry
    free: bool
    """Whether its file is gone, so that its number can go to the one that has its bytes now."""


class Before:
    """Threads may share it."""

    def __init__(self, index: Index, images: Iterable[tuple[str, Stamp]]) -> None:
        self._index = index
        index.run_script(TABLES)
        rows = ((os.fsencode(path), *stamp) for path, stamp in images)
        self.files = 0
        """In the folder now."""
        while page := list(islice(rows, PAGE)):
            index.change_many("INSERT OR REPLACE INTO walked VALUES (?, ?, ?)", page)
            self.files += len(page)
        self.images: int = index.rows("SELECT count(*) FROM old")[0][0]
        """In the index before."""

    def count_to_read(self) -> int:
        return self._index.rows(f"SELECT count(*) {TO_READ}")[0][0]

    def to_read(self) -> Iterator[tuple[str, Stamp]]:
        """Files to read, in the order of their paths."""
        page = (
            f"SELECT walked.path, walked.bytes, walked.modified {TO_READ} AND walked.path > ? ORDER BY 1 LIMIT {PAGE}"
        )
        last = b""
        while rows := self._index.rows(page, (last,)):
            for path, *stamp in rows:
                yield os.fsdecode(path), Stamp(*stamp)
            last = rows[-1][0]

    def note_gone(self, hides: Callable[[str], bool]) -> list[int]:
        """Numbers of images whose files are no longer there; they may be in a folder that hides them."""
        missing = self._index.rows("SELECT number, path FROM old WHERE path NOT IN (SELECT path FROM walked)")
        gone = [number for number, path in missing if not hides(os.fsdecode(path))]
        self._index.change_many("UPDATE old SET free = 1 WHERE number = ?", [(number,) for number in gone])
        return gone

    def at(self, path: str) -> Entry | None:
        """What the index had at a path."""
        rows = self._index.rows(f"SELECT {COLUMNS} FROM old WHERE path = ?", (os.fsencode(path),))
        return entry_of(rows[0]) if rows else None

    def with_bytes(self, digest: str) -> Known | None:
        """An image of the same bytes that has a vector; best one whose file is gone, because it wants a new one."""
        rows = self._index.rows(
            f"SELECT {COLUMNS}, free FROM old WHERE digest = ? AND row IS NOT NULL ORDER BY free DESC, number LIMIT 1",
            (digest,),
        )
        return Known(entry_of(rows[0][:-1]), bool(rows[0][-1])) if rows else None

    def take(self, number: int) -> None:
        """An image whose file was gone has one again."""
        self._index.change_many("UPDATE old SET free = 0 WHERE number = ?", [(number,)])
