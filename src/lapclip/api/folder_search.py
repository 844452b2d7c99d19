"""A folder of images that is asked questions, from Python."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from lapclip.data.any_image import as_image
from lapclip.data.pixels import open_image
from lapclip.errors import LapclipError, SearchError
from lapclip.report.document import escaped
from lapclip.searching.library import RANKING_NOTE, Hit, Library
from lapclip.searching.query import check_question, parse, parse_since
from lapclip.text import path_from_here

if TYPE_CHECKING:
    from lapclip.data.any_image import OneImage

SIDE = 160
"""Pixels of a small image's longer side."""


class Found(Sequence[Hit]):
    """Images ranked by their similarity to a question, the best first. A notebook shows them.

    Each is a `Hit` with `path` and `score`. Nothing in it shows whether an image fits.
    """

    def __init__(self, question: str, hits: Sequence[Hit]) -> None:
        self.question, self._hits = question, list(hits)

    @property
    def paths(self) -> list[Path]:
        """The images' paths."""
        return [hit.path for hit in self._hits]

    @overload
    def __getitem__(self, index: int) -> Hit: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Hit]: ...

    def __getitem__(self, index: int | slice) -> Hit | Sequence[Hit]:
        return self._hits[index]

    def __len__(self) -> int:
        return len(self._hits)

    def __iter__(self) -> Iterator[Hit]:
        return iter(self._hits)

    def __repr__(self) -> str:
        lines = [f"  {hit.score:6.3f}  {path_from_here(hit.path)}" for hit in self._hits]
        return "\n".join([f"<Found {len(self)} for {self.question!r}>", *lines])

    def _repr_html_(self) -> str:
        images = "".join(map(_figure, self))
        heading = f"<p>{escaped(self.question)}</p><p>{RANKING_NOTE}</p>"
        return f'{heading}<div style="display:flex;flex-wrap:wrap;gap:8px">{images}</div>'


def _figure(hit: Hit) -> str:
    """Return a small image inside the page, with its name and its score."""
    try:
        image = open_image(hit.path).image
        image.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=80)
        data = base64.b64encode(file.getvalue()).decode("ascii")
        shown = f'<img src="data:image/jpeg;base64,{data}" style="width:100%" alt="">'
    except (LapclipError, OSError):
        shown = "<span>cannot be read</span>"
    name = escaped(hit.path.name)
    return (
        f'<figure style="margin:0;width:{SIDE}px;overflow-wrap:anywhere" title="{escaped(hit.path)}">{shown}'
        f'<figcaption style="font-size:.8em">{name}<br>{hit.score:.3f}</figcaption></figure>'
    )


class FolderSearch:
    """The images of a folder, which `lapclip.search` has indexed. Threads may share it."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._closed = False

    @property
    def folder(self) -> Path:
        """The folder that is searched."""
        return self._library.folder

    @property
    def notes(self) -> list[str]:
        """What the model has seen, how well it does, and what could not be read: nobody should expect more of it."""
        unreadable = [
            f"{path} could not be read: {reason}"
            for path, reason in self._library.update.unreadable
        ]
        return [*self._library.update.notes, *self._library.model_notes(), *unreadable]

    def ask(
        self,
        question: str,
        limit: int = 10,
        *,
        since: str | None = None,
        exclude: Sequence[str] = (),
    ) -> Found:
        """Return the images most similar to a question.

        Parameters
        ----------
        question
            What to look for; `-word` and `-"two words"` are what not to look for.
        limit
            How many to give.
        since
            Only images from this date on, or younger than this age: `"2024-05-01"`, `"30d"`, `"1y"`.
        exclude
            Leave out images whose path in the folder, or a part of it, is like one of these: `["albums", "*.png"]`.
        """
        check_question(question, None, limit)
        oldest = parse_since(since) if since is not None else None
        answer = self._current().ask(parse(question), limit, 0, oldest, _patterns(exclude))
        return Found(question, answer.hits)

    def like(
        self,
        image: OneImage,
        limit: int = 10,
        *,
        since: str | None = None,
        exclude: Sequence[str] = (),
    ) -> Found:
        """The images that are most like another one, in any form that `encode_image` takes."""
        check_question(None, None, limit)
        oldest = parse_since(since) if since is not None else None
        hits = self._current().like_image(as_image(image), limit, 0, oldest, _patterns(exclude))
        named = os.fspath(image) if isinstance(image, (str, os.PathLike)) else "an image"
        return Found(f"like {named}", hits)

    def close(self) -> None:
        """Close the index. The object cannot be asked any more."""
        self._closed = True
        self._library.close()

    def _current(self) -> Library:
        if self._closed:
            raise SearchError("This search was closed.", hint="lapclip.search(FOLDER) again")
        return self._library.current()

    def __len__(self) -> int:
        """How many images can be found."""
        return self._current().count

    def __enter__(self) -> FolderSearch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model = path_from_here(self._library.model.which.path)
        state = "closed" if self._closed else f"{len(self):,} images"
        return f"<FolderSearch of {path_from_here(self.folder)}: {state}, model {model}>"


def _patterns(exclude: Sequence[str]) -> Sequence[str]:
    return (
        [exclude] if isinstance(exclude, str) else exclude
    )  # the letters of a lone pattern are none
