"""From what a user names to a table of images and captions: the form is recognised, and what was guessed is said."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from lapclip.config import DataConfig
from lapclip.data.sources import explain_missing as nothing
from lapclip.data.sources.class_folders import read_classes
from lapclip.data.sources.collect_rows import Gathering
from lapclip.data.sources.csv_tables import is_table, read_columns
from lapclip.data.sources.emoji import read_emoji
from lapclip.data.sources.guess_columns import NotATable
from lapclip.data.sources.image_files import is_image, plain_file, walk
from lapclip.data.sources.json_annotations import read_annotations
from lapclip.data.sources.json_lines import read_json_lines
from lapclip.data.sources.parquet import read_parquet
from lapclip.data.sources.recognise import Form, forms_in, own_tables, split_of_path, together
from lapclip.data.sources.text_sidecars import read_sidecars
from lapclip.data.sources.webdataset import expand, read_shards, split_in_name
from lapclip.data.table import Skipped, Table
from lapclip.errors import DataError, first_line

EMOJI = "emoji"
_ENDINGS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson", ".tar", ".parquet", ".pq")
_FORMS = {"text files": "text files", "class folders": "class folders", "tar": "tar shards", "parquet": "parquet files"}


def read_table(config: DataConfig) -> Table:
    """The images and captions of `config.source`. No image is opened; what is left out is counted and named."""
    source = config.source
    if source == EMOJI:
        into = _gathering(config)
        return into.table(EMOJI, read_emoji(into))
    if "://" in source or source.startswith("pipe:"):
        raise DataError(f"{source} is not a local path.", hint="download it first, then name the folder")
    if "\0" in source or not source.strip():
        raise DataError(
            "data.source names nothing.",
            hint="a folder or a table, as docs/data.md lists them",
        )
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _read_folder(path, config)
        if plain_file(path):
            return _read_file(path, config)
        if not os.path.lexists(path):
            if "{" in source or glob.has_magic(source):
                return _read_pattern(source, config)
            raise nothing.no_such(source)
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror or first_line(error)}.") from error
    raise DataError(f"{source} is not a plain file or folder.", hint="a folder of images with captions")


def _gathering(config: DataConfig) -> Gathering:
    return Gathering(with_splits=config.split_column != "")


def _read_file(path: Path, config: DataConfig) -> Table:
    """A file that the user names. Its own name says no split, except in COCO, where it is part of the form."""
    if path.suffix.lower() not in _ENDINGS and nothing.is_foreign(path):
        raise nothing.in_file(path)
    into = _gathering(config)
    split = split_in_name(path.name) if path.suffix.lower() == ".json" else ""
    how = _read_one(path, path.parent, config, into, split)
    return into.table(path.name, f"{path.name}: {how}")


def _read_pattern(source: str, config: DataConfig) -> Table:
    """Shards by a pattern, such as photos-{00000..00012}.tar."""
    named = [Path(os.path.abspath(path)) for path in expand(os.path.expanduser(source))]
    paths = [path for path in named if plain_file(path)]
    if not paths:
        raise DataError(
            f"No file matches {source}.", hint="a pattern such as 'photos-{00000..00012}.tar' or 'data/*.tar'"
        )
    if len(paths) == 1 and len(named) == 1:
        return _read_file(paths[0], config)
    try:
        into, root = _gathering(config), Path(os.path.commonpath([path.parent for path in paths]))
    except ValueError:
        raise DataError(f"{source} names files on several drives.", hint="files on one drive at a time") from None
    for path in named:
        if path not in paths:
            into.skip(str(path), "there is no such file")
    endings = {path.suffix.lower() for path in paths}
    names = [path.relative_to(root).as_posix() for path in paths]
    if endings == {".tar"}:
        how = _read_many("tar", root, names, config, into)
        return into.table("tar shards", f"{len(paths)} shards: {how}")
    if endings <= {".parquet", ".pq"}:
        how = _read_many("parquet", root, names, config, into)
        return into.table("parquet files", f"{len(paths)} files: {how}")
    packed = next((path for path in paths if nothing.how_to_unpack(path.name)), None)
    if packed:
        raise nothing.in_file(packed)
    raise DataError(f"{source} names files that are neither tar nor parquet.", hint="one file or folder at a time")


def _read_folder(root: Path, config: DataConfig, around: Sequence[Skipped] = ()) -> Table:
    """A folder; `around` is what was left out of the one that it lies in."""
    skipped = list(around)
    files = list(walk(root, skipped))
    forms = forms_in(files)
    if not forms:
        inner = {name.partition("/")[0] for name in files}
        if len(inner) == 1 and "/" in files[0]:  # a folder in a folder, as unpacking an archive leaves it
            only = inner.pop()
            outside = [left_out for left_out in skipped if not left_out.where.startswith(f"{only}/")]
            return _read_folder(root / only, config, outside)
        raise nothing.in_folder(root, files, skipped)
    if forms[0].kind == "class folders" and (tables := own_tables(files)):
        raise DataError(
            f"{root} holds data sets of its own, such as {tables[0]}.", hint=f"name one: {root / tables[0]}"
        )
    for place, form in enumerate(forms):
        try:
            return _read_form(root, form, [*forms[:place], *forms[place + 1 :]], files, skipped, config)
        except NotATable:
            if form.sure or form is forms[-1]:
                raise
    raise AssertionError("the last form is read or refused")


def _read_form(
    root: Path,
    form: Form,
    others: Sequence[Form],
    files: Sequence[str],
    skipped: Sequence[Skipped],
    config: DataConfig,
) -> Table:
    """A folder as one of the forms that it holds."""
    into = _gathering(config)
    # The folders of images that a table names look like classes, and are none.
    unused = [_FORMS.get(other.kind) or other.files[0] for other in others if other.kind != "class folders"]
    beside = f"; also there and not used: {', '.join(unused)}" if unused else ""
    for left_out in skipped:
        # Rows of a table name their images themselves.
        if form.kind in _FORMS or not is_image(left_out.where):
            into.skip(left_out.where, left_out.why)
    if form.kind in ("text files", "class folders"):
        if form.kind == "text files":
            return into.table(form.kind, read_sidecars(root, files, into) + beside)
        how, labels = read_classes(root, files, config, into)
        return into.table(form.kind, how + beside, labels)
    if form.kind in ("tar", "parquet"):
        how = _read_many(form.kind, root, form.files, config, into)
        return into.table(_FORMS[form.kind], f"{len(form.files)} {_FORMS[form.kind]}: {how}{beside}")
    return _read_tables(root, _one_table(root, form, config), config, into, beside)


def _read_many(kind: str, root: Path, names: Sequence[str], config: DataConfig, into: Gathering) -> str:
    """Shards or parquet files below a folder, each of the split that its path says."""
    read = read_shards if kind == "tar" else read_parquet
    return read([(root / name, split_of_path(name)) for name in names], root, config, into)


def _one_table(root: Path, form: Form, config: DataConfig) -> Form:
    """A form whose files belong together; of several that do not, the only one that is a table."""
    if together(form):
        return form
    tables = [name for name in form.files if _is_table(root / name, root, config)]
    if len(tables) == 1:
        return Form(form.kind, tables, form.sure)
    some = ", ".join((tables or form.files)[:4])
    if not tables:
        raise NotATable(f"None of the tables in {root} names images and captions: {some}.")
    raise DataError(f"{root} has several tables: {some}.", hint=f"name the one to use: {root / tables[0]}")


def _is_table(path: Path, root: Path, config: DataConfig) -> bool:
    try:
        if path.suffix.lower() in (".csv", ".tsv"):
            return is_table(path, root, config)
        _read_one(path, root, config, _gathering(config), "")
    except NotATable:
        return False
    return True


def _read_tables(root: Path, form: Form, config: DataConfig, into: Gathering, beside: str) -> Table:
    """The tables of a folder: one, or one a split."""
    said: dict[str, list[str]] = {}
    for name in form.files:
        split = split_of_path(name) if len(form.files) > 1 or name.lower().endswith(".json") else ""
        how = _read_one(root / name, root, config, into, split)
        said.setdefault(how, []).append(name)
    all_said = "; ".join(f"{', '.join(names)}: {how}" for how, names in said.items())
    return into.table(form.files[0] if len(form.files) == 1 else f"{len(form.files)} tables", all_said + beside)


def _read_one(path: Path, root: Path, config: DataConfig, into: Gathering, split: str) -> str:
    """Add the rows of one table, by its ending. Returns what was guessed, for the user."""
    ending = path.suffix.lower()
    if ending == ".json":
        return ", ".join(read_annotations(path, root, config, into, split))
    if ending in (".jsonl", ".ndjson"):
        return read_json_lines(path, root, config, into, split)
    if ending == ".tar":
        return read_shards([(path, split)], root, config, into)
    if ending in (".parquet", ".pq"):
        return read_parquet([(path, split)], root, config, into)
    return read_columns(path, root, config, into, split)
