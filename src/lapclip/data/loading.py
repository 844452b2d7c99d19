"""From the setting `data.source` to images and captions that training and evaluation read."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.config import AUTO, BY_CONTENT, BY_NAME, DataConfig
from lapclip.data.copies import SIGNATURE_SIDE, copy_keys
from lapclip.data.dataset import DataSet, Pairs, Pixels, count_seen, join_splits
from lapclip.data.decode import NO_MEMORY, decoding_threads
from lapclip.data.packed_index import INDEX, Entry, digest_of
from lapclip.data.packed_store import (
    MIDDLE,
    SIGNATURE,
    WHOLE,
    Packed,
    pack,
    prepare,
    room_left,
    room_needed,
    store_folder,
    use_store,
)
from lapclip.data.pixels import View, as_view, whole_side
from lapclip.data.sources import find_source, read_table
from lapclip.data.splits import TRAIN, are_drawn, assign_splits, check_trainable
from lapclip.data.table import (
    DrawnImage,
    Row,
    Skipped,
    StoredImage,
    Table,
    by_reason,
    check_broken,
    check_enough,
    check_table,
    count_for_training,
    note_on_numbers,
    some,
)
from lapclip.errors import DataError, first_line
from lapclip.progress import DataProgress
from lapclip.suggest import command
from lapclip.text import counted, printable

SOME = 64
"""Images for training that are compared with those a run learnt from."""
ROOM = 0.5
"""Share of the free disk that packed images may take; where they need more, `data.stream=auto` streams."""


@dataclass(frozen=True)
class Listing:
    """What a data set holds before its images are read: a table and the split of each row. Any rows can be loaded."""

    config: DataConfig
    table: Table
    drawn: DataSet | None = None
    """The images themselves, where they are drawn; None where they are files."""
    progress: DataProgress | None = None

    @cached_property
    def splits(self) -> Sequence[str]:
        """Of each row: the data's own, or drawn where it has none. To draw them by content, images are read."""
        found = (
            read_signatures(self.config, self.table, self.progress)
            if are_drawn(self.table.rows)
            else None
        )
        return split_rows(self.config, self.table.rows, found)

    @property
    def alphabet(self) -> str | None:
        """The characters of the captions, where the source declares them."""
        return self.drawn.alphabet if self.drawn else None

    def named_splits(self, unnamed: str) -> list[str]:
        """The split that the data itself gives each row, or a name for those to which it gives none."""
        return [row.split or unnamed for row in self.table.rows]

    def load(
        self, rows: Sequence[int], view: View | int, progress: DataProgress | None = None
    ) -> tuple[Pairs, list[str]]:
        """Some rows in ascending order as a model sees them, broken ones left out, and what the user should know."""
        if self.drawn is None:
            return load_to_score(self.config, self.table, rows, view, progress)
        chosen, parts, first = np.array(rows, dtype=np.int64), [], 0
        for pairs in self.drawn.splits.values():
            last = first + len(pairs)
            inside = chosen[(chosen >= first) & (chosen < last)] - first
            parts += [pairs.select(inside.tolist())] if len(inside) else []
            first = last
        return join_splits(parts or [self.drawn.train.select([])]), []

    def has_changed_since(
        self, seen: Path, view: View | int, progress: DataProgress | None = None
    ) -> bool:
        """Whether the files are no longer those that a run learnt from, by some of those that are for training now.

        Images that were saved again have other bytes and may have changed sides, and nothing else would show it. A few
        may differ. Copies of held-out images are for training by name, and yet were left out of it.
        """
        training = [at for at, split in enumerate(self.splits) if split == TRAIN]
        if self.drawn is not None or not training:
            return False
        some, _ = self.load(training[:: -(-len(training) // SOME)], view, progress)
        known = count_seen(some.identities, seen)
        if known is None or known >= 0.9 * len(some):
            return False
        held_out, _ = self.load(
            [at for at, split in enumerate(self.splits) if split != TRAIN], view, progress
        )
        assert some.identities is not None
        assert held_out.identities is not None
        learnt = some.identities[~np.isin(some.identities, held_out.identities)]
        return (count_seen(learnt, seen) or 0) < 0.9 * len(learnt)


def list_data(
    config: DataConfig,
    view: View | int,
    progress: DataProgress | None = None,
    table: Table | None = None,
) -> Listing:
    """What a data set holds, its images still unread. Drawn images are drawn as a model with that view sees them.
    `table` is there where the data was read already."""
    source = find_source(config.source)
    if not source.is_drawn:
        return Listing(config, table or source.read_table(config), progress=progress)
    drawn = source.draw(config, as_view(view).side, progress)
    rows = [
        Row(DrawnImage(f"{split} {at + 1}", pairs.pixels[at]), tuple(pairs.captions[at]), split)
        for split, pairs in drawn.splits.items()
        for at in range(len(pairs))
    ]
    table = Table(rows, source.name, source.title)
    return Listing(config, table, drawn)


@dataclass(frozen=True)
class Signatures:
    """What reading all images in small has shown."""

    keys: Mapping[int, str]
    """For each row that can be used, a text that copies of its image share and no other image has."""
    skipped: Sequence[Skipped] = ()


def split_rule(config: DataConfig) -> str:
    """What splits of this data are drawn by, where they are drawn."""
    return config.split_rule if find_source(config.source).by_content else BY_NAME


def read_signatures(
    config: DataConfig, table: Table, progress: DataProgress | None = None
) -> Signatures | None:
    """Read each image in small, once for all models and runs; None where splits go by name."""
    if split_rule(config) != BY_CONTENT:
        return None
    folder = use_store(_source_key(config), SIGNATURE_SIDE, SIGNATURE)
    found = pack(
        [row.image for row in table.rows], folder, SIGNATURE_SIDE, SIGNATURE, progress, store=False
    )
    keys = copy_keys(
        [entry.content for entry in found.entries],
        [entry.signature for entry in found.entries],
    )
    return Signatures(dict(zip(found.usable, keys, strict=True)), found.skipped)


def split_rows(config: DataConfig, rows: Sequence[Row], found: Signatures | None) -> list[str]:
    """The split of each row. Where images were read, those that cannot be used have no part in the draw."""
    if found is None or not are_drawn(rows):
        return assign_splits(rows, config.seed, held_out=config.held_out)
    splits = [row.split or TRAIN for row in rows]
    usable = list(found.keys)
    keys = [found.keys[at] for at in usable]
    drawn = assign_splits([rows[at] for at in usable], config.seed, keys, config.held_out)
    for at, split in zip(usable, drawn, strict=True):
        splits[at] = split
    return splits


def load_to_score(
    config: DataConfig,
    table: Table,
    chosen: Sequence[int],
    view: View | int,
    progress: DataProgress | None = None,
) -> tuple[Pairs, list[str]]:
    """Some rows of a table with their images cut to the middle that a model sees, and what the user should know."""
    images = [table.rows[at].image for at in chosen]
    packed = pack(images, use_store(_source_key(config), view, MIDDLE), view, MIDDLE, progress)
    check_broken(config, table, packed.skipped)
    skipped = [*table.skipped, *packed.skipped]
    pairs = _pairs(table, _by_row(chosen, packed), packed.pixels())
    return pairs, [note for note in (table.how, left_out(skipped)) if note]


def load_data(
    config: DataConfig,
    view: View | int,
    progress: DataProgress | None = None,
    table: Table | None = None,
) -> DataSet:
    """Load the data that a run learns from and is scored on, its images ready for a model with that view.

    Training images stay whole, to be cropped. Those of other splits are cut to the middle that the model sees. Pass
    `table` if it was read already.
    """
    view, source = as_view(view), find_source(config.source)
    if source.is_drawn:
        check_enough(config, source.count_images(config))
        return source.draw(config, view.side, progress)
    table = table or source.read_table(config)
    check_table(config, table)
    signatures = read_signatures(config, table, progress)
    splits = _checked_splits(config, table, signatures)
    usable = range(len(splits)) if signatures is None else sorted(signatures.keys)
    training = [row for row in usable if splits[row] == TRAIN]
    held_out = [row for row in usable if splits[row] != TRAIN]
    held_out.sort(key=lambda row: splits[row])

    images = [row.image for row in table.rows]
    whole = _whole_view(view)
    training_store = use_store(_source_key(config), whole, WHOLE)
    scored_store = use_store(_source_key(config), view, MIDDLE)
    needed = room_needed(training_store, len(training), whole.side)
    needed += room_needed(scored_store, len(held_out), view.side)
    streams, why_streams = _streams(config, needed, room_left(training_store))
    scored = pack([images[row] for row in held_out], scored_store, view, MIDDLE, progress)
    learned = pack(
        [images[row] for row in training], training_store, whole, WHOLE, progress, store=not streams
    )
    broken = [*learned.skipped, *scored.skipped]
    if signatures is not None:
        broken = [*signatures.skipped, *broken]
    check_broken(config, table, broken)

    to_score = _by_row(held_out, scored)
    to_learn = _by_row(training, learned)
    held_out_files = {entry.digest for entry in to_score.values()}
    twins = [row for row, entry in to_learn.items() if entry.digest in held_out_files]
    for row in twins:
        del to_learn[row]
    if streams:
        digests = [entry.digest for entry in to_learn.values()]
        pixels: Pixels = StreamedPixels([images[row] for row in to_learn], digests, whole)
    else:
        pixels = learned.pixels(to_learn.values())
    aspects = np.array([entry.aspect for entry in to_learn.values()], dtype=np.float32)
    if view.resize == "squash":  # the model never sees other proportions
        aspects = np.ones_like(aspects)

    loaded: dict[str, Pairs] = {}
    for split in dict.fromkeys(splits):
        if split == TRAIN:
            loaded[split] = _pairs(table, to_learn, pixels, aspects, streams)
        else:
            members = {row: entry for row, entry in to_score.items() if splits[row] == split}
            loaded[split] = _pairs(table, members, scored.pixels(members.values()))
    empty = [split for split, pairs in loaded.items() if not len(pairs)]
    for split in empty:
        if split in (TRAIN, "val"):
            raise DataError(
                f"No image of the split {split} can be used.",
                hint=command("data", "check", config.source),
            )
        del loaded[split]  # else a run would fail at its very end, when it is scored on the split

    used = to_learn | to_score
    check_enough(config, count_for_training([table.rows[row] for row in used]))
    how_split, note_on_copies = _describe_splits(config, table, splits, signatures, used)
    notes = [
        note_on_numbers(table.rows),
        note_on_copies,
        left_out([*table.skipped, *broken]),
        _left_out_twins([printable(images[row].name) for row in twins]),
    ]
    for split in empty:
        notes.append(f"no image of the split {split} can be used, so nothing is scored on it")
    notes += [why_streams, table.how]  # last: a start shows the first of many notes
    return DataSet(
        loaded,
        _fingerprint(table.rows, splits, used),
        how_split=how_split,
        notes=[note for note in notes if note],
        classes=table.classes,
    )


def _checked_splits(config: DataConfig, table: Table, signatures: Signatures | None) -> list[str]:
    """Return the split of each row. Raises DataError if no run could train with them."""
    splits = split_rows(config, table.rows, signatures)
    if signatures is not None:
        check_broken(config, table, signatures.skipped)
        keys = list(signatures.keys.values())
        if len(keys) > 1 and len(set(keys)) == 1 and are_drawn(table.rows):
            raise DataError(
                f"All {len(keys):,} images show the same, so none of them can be held out.",
                hint="other images, or --set data.split_rule=name",
            )
    check_trainable(splits)
    return splits


def _by_row(rows: Sequence[int], packed: Packed) -> dict[int, Entry]:
    """Return the entries of packed images by their rows in the table."""
    return {rows[index]: entry for index, entry in zip(packed.usable, packed.entries, strict=True)}


def _whole_view(view: View) -> View:
    """How images are stored that are cropped later."""
    return View(whole_side(view.resized), colours=view.colours)


def checked_indexes(config: DataConfig, view: View) -> list[Path]:
    """Where there is written what reading images showed that were not stored: in small, and before they are streamed.
    A computer that is given these files decodes no image again whose bytes are the same there."""
    if find_source(config.source).is_drawn:
        return []
    stores: list[tuple[View | int, str]] = [(SIGNATURE_SIDE, SIGNATURE)]
    stores += [(_whole_view(view), WHOLE)] * (config.stream == "always")
    return [store_folder(_source_key(config), view, fit) / INDEX for view, fit in stores]


def load_as_seen(
    config: DataConfig, pairs: Pairs, view: View | int, progress: DataProgress | None = None
) -> Pixels:
    """Training images as another model sees them, in the same order: their middles, decoded when they are asked for,
    or drawn at its size."""
    source = find_source(config.source)
    if source.is_drawn:
        return source.draw(config, as_view(view).side, progress).train.pixels
    assert pairs.identities is not None
    images = {row.image.name: row.image for row in read_table(config).rows}
    digests = [f"{identity:016x}" for identity in pairs.identities.tolist()]
    return StreamedPixels([images[name] for name in pairs.names], digests, view, MIDDLE)


def _pairs(
    table: Table,
    chosen: Mapping[int, Entry],
    pixels: Pixels,
    aspects: np.ndarray | None = None,
    sequential: bool = False,
) -> Pairs:
    captions = [table.rows[at].captions for at in chosen]
    names = [table.rows[at].image.name for at in chosen]
    labels = np.array([table.labels[at] for at in chosen], dtype=np.int64) if table.labels else None
    identities = np.array(
        [int(entry.digest[:16], 16) for entry in chosen.values()], dtype=np.uint64
    )
    files = _file_numbers([table.rows[at].image for at in chosen]) if sequential else None
    return Pairs(pixels, captions, names, aspects, sequential, identities, labels, files)


def _file_numbers(images: Sequence[StoredImage]) -> np.ndarray:
    """A number for each image that those of one file share."""
    numbers: dict[Path | None, int] = {}
    return np.array(
        [numbers.setdefault(image.path, len(numbers)) for image in images], dtype=np.int64
    )


def _source_key(config: DataConfig) -> str:
    """What tells apart the sources whose images have the same names."""
    return (
        f"{os.path.abspath(config.source)} {config.pictures}"
        if Path(config.source).exists()
        else config.source
    )


def _streams(config: DataConfig, needed: int, free: int) -> tuple[bool, str]:
    """Whether training images are decoded each time, and why; the reason is empty where that is as asked or usual."""
    if config.stream != AUTO:
        return config.stream == "always", ""
    if needed <= ROOM * free:
        return False, ""
    why = f"packed, all images would take {needed / 1e9:,.2f} GB, more than half of the {free / 1e9:,.2f} GB free"
    return True, f"training images are decoded each time they are needed: {why}"


def left_out(skipped: Sequence[Skipped]) -> str:
    """How many are left out, by reason; empty where none is."""
    return f"left out {len(skipped):,}: {by_reason(skipped)}" if skipped else ""


def _describe_splits(
    config: DataConfig,
    table: Table,
    splits: Sequence[str],
    signatures: Signatures | None,
    used: Mapping[int, Entry],
) -> tuple[str, str]:
    """Return how the splits came about, for `run.toml`, and a note on copies for the user, or ""."""
    drawn = are_drawn(table.rows)
    rule = f"drawn by {split_rule(config)}" if drawn else "the data's own"
    if signatures is None:
        return rule, ""
    rows_by_key: dict[str, list[int]] = defaultdict(list)
    for row in used:
        rows_by_key[signatures.keys[row]].append(row)
    copies = [rows for rows in rows_by_key.values() if len(rows) > 1]
    across = [rows for rows in copies if len({splits[row] for row in rows}) > 1]
    count = f"{sum(map(len, copies)):,} of {len(used):,} images have a copy, exact or near"
    if across:
        examples = some([_name_one_of_each_split(table, splits, rows) for rows in across])
        note = (
            f"{counted(len(across), 'image')} in two splits of the data, exactly or nearly, "
            f"so scores come out too good: {examples}; lapclip data check shows more"
        )
        return f"{rule}; {count}, {len(across):,} of them in two splits", note
    if copies and drawn:
        note = f"{count}: splits are drawn by content, so each is on one side"
        return f"{rule}; {count}, all on one side", note
    return rule, ""


def _name_one_of_each_split(table: Table, splits: Sequence[str], rows: Sequence[int]) -> str:
    """Return the names of some copies of an image: the first one in each split."""
    first: dict[str, str] = {}
    for row in rows:
        name = printable(table.rows[row].image.name)
        first.setdefault(splits[row], f"{name} ({splits[row]})")
    return " = ".join(first.values())


def _left_out_twins(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"left out of training {len(names):,}, because held-out images are the same files: {some(names)}"


def _fingerprint(rows: Sequence[Row], splits: Sequence[str], used: Mapping[int, Entry]) -> str:
    """Changes with any image, caption or split that a run would see; not with names, dates or folders."""
    digest = hashlib.sha256()
    for at in sorted(used):
        digest.update(json.dumps([used[at].digest, rows[at].captions, splits[at]]).encode())
    return digest.hexdigest()[:16]


class StreamedPixels:
    """Images decoded each time they are asked for, where packed ones would not fit the disk; squares as there.

    Before a run each image is decoded once, so that those that cannot be are left out together with their captions.
    What fails later has changed since (its bytes must have the digest given) or cannot be read any more; the run then
    ends and names it. It is never replaced by another image, because that would be learnt with the wrong captions, and
    a resumed run would not see the same pairs.
    """

    def __init__(
        self,
        images: Sequence[StoredImage],
        digests: Sequence[str],
        view: View | int,
        fit: str = WHOLE,
    ) -> None:
        self._images, self._digests, self._view, self._fit = images, digests, as_view(view), fit
        self.shape = (len(images), self._view.side, self._view.side, 3)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, rows: Any, /) -> np.ndarray:
        if isinstance(rows, (int, np.integer)):
            return self._decoded(range(len(self))[rows])
        asked = np.arange(len(self))[rows]
        squares = np.empty((len(asked), *self.shape[1:]), np.uint8)
        # In the order of the table, because neighbours are often in one file.
        order = np.argsort(asked, kind="stable")
        decoded = decoding_threads().map(self._decoded, asked[order])
        for at, square in zip(order, decoded, strict=True):
            squares[at] = square
        return squares

    def _decoded(self, row: int) -> np.ndarray:
        image = self._images[row]
        try:
            data = image.read()
            if not digest_of(data).startswith(self._digests[row]):
                raise DataError("it has changed since")
            return prepare(data, self._view, self._fit)[0]
        except MemoryError:
            why = NO_MEMORY
        except (OSError, ValueError) as error:
            why = f"it cannot be read ({first_line(error)})"
        except DataError as error:
            why = error.message
        raise DataError(
            f"{image.name} was an image when the run began, and now {why}.",
            hint="bring it back as it was and lapclip resume, or a new run without it",
        )
