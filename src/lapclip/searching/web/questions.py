"""What can be asked of the library: words, an image of the index, an image from elsewhere, or just the newest."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image

from lapclip.data.decode import decode, look
from lapclip.searching.library import Library
from lapclip.searching.web.images import as_jpeg, shrunk

PART = 200
"""Images of one answer."""
MOST = 50_000
"""Images that one question shows. Nobody scrolls further, and browsers cannot draw pages without end."""
LONGEST = 1000
"""Characters of a question."""
LARGEST_NUMBER = 2**53
"""Browsers know no larger ones, and SQLite not many more."""
KEPT = 8
"""Images to search by that are remembered."""
ASKED_SIDE = 1024
"""Side that is kept of an image to search by: more than any model looks at."""


class Asked(NamedTuple):
    """An image to search by."""

    image: Image.Image
    preview: bytes


class Question(NamedTuple):
    """Which images, and which part of them."""

    part: int
    words: str = ""
    like: int | None = None
    picture: Asked | None = None


class Questions:
    """Reads questions and answers them, among the images that are young enough and not left out."""

    def __init__(self, library: Library, since: float | None = None, exclude: Sequence[str] = ()) -> None:
        self._library = library
        self._narrowed: dict[str, Any] = {"since": since, "exclude": tuple(exclude)}
        self.count = library.count_of(**self._narrowed)
        self._asked: OrderedDict[str, Asked] = OrderedDict()

    def read(self, given: Mapping[str, str]) -> Question:
        """A question from the parts of an address. Raises ValueError with a sentence where it is none."""
        words, picture = given.get("words", "").strip(), given.get("picture", "")
        if len(words) > LONGEST:
            raise ValueError(f"A question has at most {LONGEST:,} characters.")
        try:
            part, like = int(given.get("part", "0")), int(given["like"]) if "like" in given else None
        except ValueError:
            raise ValueError("A part and an image are named by numbers.") from None
        if not 0 <= part < MOST // PART:
            raise ValueError(f"There are {MOST // PART} parts at most.")
        if not 0 <= (like or 0) < LARGEST_NUMBER:
            raise ValueError("There is no image of this number.")
        asked = self._asked.get(picture)
        if picture and asked is None:
            raise ValueError("This image is not remembered any more: drop it here again.")
        return Question(part, words, like, asked)

    def answer(self, question: Question) -> dict[str, Any]:
        """A part of the images, how many there are, and how long it took."""
        began, library = time.perf_counter(), self._library
        page = {"limit": PART, "offset": question.part * PART, **self._narrowed}
        if question.picture:
            hits = library.like_image(question.picture.image, **page)
        elif question.like is not None:
            hits = library.like(question.like, **page)
        elif question.words:
            hits = library.find(question.words, **page)
        else:
            hits = library.newest(**page)
        total = self._library.count_of(**self._narrowed, without=question.like) if hits or question.part else 0
        scored = bool(question.picture or question.words) or question.like is not None
        return {
            "results": [
                {"number": hit.number, "name": hit.path.name, "score": round(hit.score, 4) if scored else None}
                for hit in hits
            ],
            "total": min(total, MOST),
            "ms": round(1000 * (time.perf_counter() - began), 1),
        }

    def keep(self, data: bytes) -> str:
        """Remember an image to search by. Raises DataError where it is none."""
        header = look(data)
        with header.turn():
            image = shrunk(decode(header, ASKED_SIDE).image, ASKED_SIDE)
        name = hashlib.sha256(data).hexdigest()[:24]
        self._asked[name] = Asked(image, as_jpeg(shrunk(image)))
        self._asked.move_to_end(name)
        while len(self._asked) > KEPT:
            self._asked.popitem(last=False)
        return name

    def preview(self, name: str) -> bytes | None:
        """An image to search by, small."""
        asked = self._asked.get(name)
        return asked.preview if asked else None
