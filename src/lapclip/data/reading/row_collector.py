"""Rows as a source finds them: one an image, each caption once, and a record of everything that is left out."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

from lapclip.data.splits import split_named
from lapclip.data.table import Row, Skipped, StoredImage, Table
from lapclip.errors import DataError

LONGEST = 20_000
"""Characters of a caption; a longer one is no caption but a damaged file."""
_split_named = lru_cache(maxsize=256)(split_named)
_UNSEEN = re.compile(r"[\x00-\x20\x7f-\x9f\ud800-\udfff\ufeff]+")
"""Spaces, line ends, control characters, halves of characters and marks of byte order."""


def clean_caption(text: str) -> str:
    """A caption on one line: control characters and runs of spaces become one space."""
    return _UNSEEN.sub(" ", text).strip()


class RowCollector:
    """Collects what a source names. Each call of `add` or `skip` counts one record.

    Without splits, those that the data names are as if they were not there, and new ones are drawn.
    """

    def __init__(self, *, with_splits: bool = True) -> None:
        self._with_splits = with_splits
        self._found: dict[str, tuple[StoredImage, dict[str, None], str]] = {}
        self._labels: dict[str, str] = {}
        self.skipped: list[Skipped] = []
        self.records = 0
        self.repeated = 0

    def __len__(self) -> int:
        return len(self._found)

    def skip(self, where: str, why: str) -> None:
        """Leave one record out, by name."""
        self.records += 1
        self.skipped.append(Skipped(where, why))

    def add(self, image: StoredImage | str, caption: str, split: str, where: str) -> None:
        """One caption of an image. In place of an image there may be the reason why there is none."""
        if isinstance(image, str):
            return self.skip(where, image)
        caption = clean_caption(caption)
        if not caption:
            return self.skip(where, "the caption is empty")
        if len(caption) > LONGEST:
            return self.skip(where, f"the caption has {len(caption):,} characters, more than {LONGEST:,}")
        own = ""
        if split and self._with_splits:
            own = _split_named(split) or ""
            if not own and split.strip():
                return self.skip(where, f"the split {split.strip()[:40]!r} is none of train, val, test")
        entry = self._found.get(image.name)
        if entry is None:
            self._found[image.name] = (image, {caption: None}, own)
        elif own and entry[2] and entry[2] != own:
            # An image in two splits would be trained on and scored on; the first one that is named keeps it.
            return self.skip(where, f"the image is in {entry[2]} already, here in {own}")
        else:
            if own and not entry[2]:
                self._found[image.name] = (image, entry[1], own)
            if caption in entry[1]:
                self.repeated += 1
            entry[1][caption] = None
        self.records += 1
        return None

    def holds(self, name: str) -> bool:
        """Whether an image of this name has a caption already."""
        return name in self._found

    def label(self, name: str, label: str) -> None:
        """The class of an image, where the source has classes."""
        self._labels[name] = label

    def table(self, kind: str, how: str) -> Table:
        """What was found, with the class of each image where there are classes. Raises where that is nothing, with
        the commonest reason."""
        if not self._found:
            raise self._nothing(kind)
        rows = [Row(image, tuple(captions), split) for image, captions, split in self._found.values()]
        names = [self._labels[row.image.name] for row in rows] if self._labels else []
        classes = {name: at for at, name in enumerate(dict.fromkeys(names))}
        labels = [classes[name] for name in names]
        return Table(rows, kind, how, self.skipped, list(classes), labels, self.records, self.repeated)

    def _nothing(self, kind: str) -> DataError:
        if not self.skipped:
            return DataError(f"{kind} has no rows.", hint="an image and a caption a row")
        why, _ = Counter(skipped.why for skipped in self.skipped).most_common(1)[0]
        first = next(skipped for skipped in self.skipped if skipped.why == why)
        unfound = "image" in why or "folder" in why
        return DataError(
            f"None of the {self.records:,} rows of {kind} can be used. {first.where}: {why}.",
            hint="--set data.pictures=FOLDER, where the images are" if unfound else "other data, or mend this",
        )
