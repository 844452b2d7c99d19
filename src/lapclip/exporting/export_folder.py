"""A folder that is written whole or not at all, and never over something else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lapclip.errors import WeightsError
from lapclip.paths import replace

README = "README.md"
EXPORTED = "exported"
"""The folder in a run's own that exports go to, each under the name of its format."""
MARK = "Written by `lapclip export`."
"""The line of a README that says that a folder is ours to replace."""


def check_free(out: Path, *, force: bool) -> None:
    """Refuse a path that holds something. With `force` an earlier export may be replaced, and nothing else."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if not out.exists() and not out.is_symlink():
        return
    if not _is_export(out):
        raise WeightsError(f"{out} is there and is no export, so it is left alone.", hint="--out NEW_FOLDER")
    if not force:
        raise WeightsError(f"{out} holds an earlier export.", hint="--force to replace it, or --out NEW_FOLDER")


@contextmanager
def written_whole(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to fill, which takes its place once all is written."""
    check_free(out, force=force)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        check_free(out, force=force)  # it may have been filled since
        if out.exists():
            old = out.with_name(f".{out.name}.{os.getpid()}.old")
            replace(out, old)
            try:
                replace(partial, out)
            except OSError:
                replace(old, out)  # what was there stays
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            replace(partial, out)
    except OSError as error:
        raise WeightsError(
            f"Cannot write {out}: {error.strerror or error}.", hint="--out FOLDER, where there is room"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_export(out: Path) -> bool:
    try:
        return MARK in (out / README).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
