"""Files that are written where the user points, by `--out` and its like.

Nothing that lapclip did not write is replaced. Its own files begin with a mark that tells them from others. All files
of one call are written beside their targets first and renamed at the end, so that a full disk leaves the older ones.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lapclip.errors import ConfigError
from lapclip.paths import flush, partial_path, remove, replace, sweep

MARK = "Written by lapclip, which may replace this file."
COMMENT = f"<!-- {MARK} -->\n"  # in front of Markdown and SVG
JSON_MARK = "written_by"  # a key for `marked`
HEAD_BYTES = 300  # every mark lies within so many
OTHER_FOLDER = "--out with another folder"

Content = str | bytes | Callable[[Path], object]
"""Text, bytes, or a function that writes to the path it is given."""


def marked(result: Mapping[str, object]) -> dict[str, object]:
    """Return a JSON object that begins with the mark."""
    return {JSON_MARK: MARK, **result}


def is_ours(path: Path) -> bool:
    """Return whether a file begins as those that lapclip writes. A link never does: it is the user's."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(HEAD_BYTES)
    except OSError:
        return False


def refusal(path: Path, hint: str) -> ConfigError:
    """Return the error for a path that holds something of the user's."""
    return ConfigError(
        f"{path} is there and was not written by lapclip, so it is left alone.", hint=hint
    )


def check_replaceable(paths: Iterable[Path], hint: str = OTHER_FOLDER) -> None:
    """Raise ConfigError for the first path that holds something else than an older file of lapclip."""
    for path in paths:
        if (path.exists() or path.is_symlink()) and not is_ours(path):
            raise refusal(path, hint)


def write_user_files(
    contents: Mapping[Path, Content],
    *,
    replace_any: bool = False,
    hint: str = OTHER_FOLDER,
) -> list[Path]:
    """Write all files or none, and return their paths. What is not ours is refused.

    With `replace_any` it is not: for the folder of a run, and for files that the caller has checked.
    """
    if not replace_any:
        check_replaceable(contents, hint)
    partials = {path: partial_path(path) for path in contents}
    current = Path()
    try:
        for current, content in contents.items():
            current.parent.mkdir(parents=True, exist_ok=True)
            sweep(current.parent, f".{glob.escape(current.name)}.*")
            _write(partials[current], content)
        if not replace_any:  # the user may have put something there since
            check_replaceable(contents, hint)
        for current, partial in partials.items():
            replace(partial, current)
    except OSError as error:
        raise ConfigError(
            f"Cannot write {current}: {error.strerror or error}.", hint=hint
        ) from error
    finally:
        for partial in partials.values():
            remove(partial)
    return list(contents)


def _write(partial: Path, content: Content) -> None:
    if isinstance(content, str):
        partial.write_text(content, encoding="utf-8", newline="\n")
    elif isinstance(content, bytes):
        partial.write_bytes(content)
    else:
        content(partial)
    flush(partial)
