"""Which form of data a folder holds: the most specific one that is there, and what else there is."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lapclip.data.sources.class_folders import has_classes
from lapclip.data.sources.image_files import is_image
from lapclip.data.sources.text_sidecars import texts_beside
from lapclip.data.sources.webdataset import split_in_name

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")
_WHOLE = re.compile(r"(captions[^/]*|dataset(?!_info|_dict)[^/]*|[^/]*karpathy[^/]*)\.json")
_METADATA = re.compile(r"metadata\.(jsonl|csv|parquet)")
_USUAL = re.compile(r"captions\.(csv|tsv|txt|jsonl)|[^/]*\.token(\.txt)?|results[^/]*\.(csv|token)", re.IGNORECASE)


@dataclass(frozen=True)
class Form:
    """A form of data that a folder holds, and the files that make it."""

    kind: str
    files: Sequence[str] = ()
    sure: bool = True
    """Whether the name says so. A file of any other name may be something else, such as settings or a list of dates."""


def forms_in(files: Sequence[str]) -> list[Form]:
    """The forms that a folder holds, the most specific first."""
    top = [name for name in files if "/" not in name]
    near = [name for name in files if name.count("/") <= 1]
    found = [
        Form("json", [name for name in near if _WHOLE.fullmatch(posixpath.basename(name))]),
        Form("metadata", [name for name in files if _METADATA.fullmatch(posixpath.basename(name))]),
        Form("table", [name for name in top if _USUAL.fullmatch(name)]),
        Form("table", [name for name in top if name.lower().endswith(TABLES) and not _is_known(name)], sure=False),
        Form("json", [name for name in top if name.lower().endswith(".json") and not _WHOLE.fullmatch(name)], False),
        Form("tar", [name for name in files if name.lower().endswith(".tar")]),
        Form("parquet", [name for name in files if name.lower().endswith((".parquet", ".pq")) and not _is_known(name)]),
    ]
    forms = [form for form in found if form.files]
    images = sum(map(is_image, files))
    beside, classes = len(texts_beside(files)), has_classes(files)
    if beside and (2 * beside > images or not classes):
        forms.append(Form("text files"))
    if classes:
        forms.append(Form("class folders"))
    return forms


def own_tables(files: Sequence[str]) -> list[str]:
    """Tables in the folders of a folder: these are data sets, not classes."""
    return [name for name in files if name.count("/") == 1 and _USUAL.fullmatch(posixpath.basename(name))]


def _is_known(name: str) -> bool:
    leaf = posixpath.basename(name)
    return bool(_USUAL.fullmatch(leaf) or _METADATA.fullmatch(leaf))


def split_of_path(name: str) -> str:
    """The split that a file's folder or else its own name says; empty where neither does."""
    folders, leaf = posixpath.split(name)
    return next((split for part in folders.split("/") if (split := split_in_name(part))), split_in_name(leaf))


def together(form: Form) -> bool:
    """Whether several files are parts of one data set: each says its split, or tells of the images beside it."""
    return len(form.files) == 1 or form.kind == "metadata" or all(split_of_path(name) for name in form.files)
