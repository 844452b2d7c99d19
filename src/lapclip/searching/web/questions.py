"""What can be asked of the library: words, an image of the index, an image from elsewhere, or just the newest."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image

from lapclip.data.decode import decode, read_header
from lapclip.errors import SearchError
from lapclip.paths import digest_of_bytes
from lapclip.searching.library import Answer, Entry, Library
from lapclip.searching.query import excluded, parse
from lapclip.searching.web.images import as_jpeg, shrunk

PAGE = 200
"""Images of one page of an answer."""
MOST = 50_000
"""Images that one question shows. Nobody scrolls further, and browsers cannot draw pages without end."""
LONGEST = 1000
"""Characters of a question."""
LARGEST_NUMBER = 2**53
"""Browsers know no larger ones, and SQLite not many more."""
REMEMBERED = 8
"""Images to search by that are remembered."""
REST = 20
"""Times as long as the index took to read, and a second at least, before it is read again: it may be changing all
the time, while another process indexes."""
ASKED_SIDE = 1024
"""Side that is remembered of an image to search by: more than any model looks at."""


class AskedImage(NamedTuple):
    """An image to search by."""

    image: Image.Image
    preview: bytes


class Question(NamedTuple):
    """Which images, and which page of them."""

    page: int
    words: str = ""
    like: int | None = None
    image: AskedImage | None = None


class Questions:
    """Reads questions and answers them, among the images that are young enough and not left out."""

    def __init__(self, library: Library, since: float | None = None, exclude: Sequence[str] = ()) -> None:
        self.library = library
        """As the index was read last."""
        self._since, self._exclude = since, tuple(exclude)
        self._narrowed: dict[str, Any] = {"since": since, "exclude": self._exclude}
        self.count = library.count_of(**self._narrowed)
        self._readings, self._next_reading = 1, 0.0
        self._asked: OrderedDict[str, AskedImage] = OrderedDict()

    def read(self, given: Mapping[str, str]) -> Question:
        """A question from an address. Raises ValueError with a sentence where it is none."""
        words, image = given.get("words", "").strip(), given.get("image", "")
        if len(words) > LONGEST:
            raise ValueError(f"A question has at most {LONGEST:,} characters.")
        try:
            page, like = int(given.get("page", "0")), int(given["like"]) if "like" in given else None
        except ValueError:
            raise ValueError("A page and an image are named by numbers.") from None
        if not 0 <= page < MOST // PAGE:
            raise ValueError(f"There are {MOST // PAGE} pages at most.")
        if not 0 <= (like or 0) < LARGEST_NUMBER:
            raise ValueError("There is no image of this number.")
        asked = self._asked.get(image)
        if image and asked is None:
            raise ValueError("This image is not remembered any more: drop it here again.")
        return Question(page, words, like, asked)

    def shows(self, entry: Entry) -> bool:
        """Whether an image is young enough and not left out."""
        time = entry.modified / 1e9 if entry.taken is None else entry.taken
        return (self._since is None or time >= self._since) and not excluded(entry.path, self._exclude)

    def answer(self, question: Question) -> dict[str, Any]:
        """A page of the images, how many there are, how long it took, and which reading of the index that is."""
        began, library = time.perf_counter(), self._read_again()
        chosen = {"limit": PAGE, "offset": question.page * PAGE, **self._narrowed}
        if question.image:
            found = Answer(library.like_image(question.image.image, **chosen))
        elif question.like is not None:
            known = library.entry(question.like)
            found = Answer(library.like(question.like, **chosen) if known and self.shows(known) else [])
        elif question.words:
            found = library.ask(parse(question.words), **chosen)
        else:
            found = Answer(library.newest(**chosen))
        hits = found.hits
        total = library.count_of(**self._narrowed, without=question.like) if hits or question.page else 0
        scored = bool(question.image or question.words) or question.like is not None
        return {
            "results": [
                {
                    "number": hit.number,
                    "name": hit.path.name,
                    "score": round(hit.score, 4) if scored else None,
                    "fit": hit.fit,
                }
                for hit in hits
            ],
            **found.to_dict(),
            "total": min(total, MOST),
            "count": self.count,
            "reading": self._readings,
            "ms": round(1000 * (time.perf_counter() - began), 1),
        }

    def _read_again(self) -> Library:
        """The library as the index is now, or was a moment ago."""
        began = time.monotonic()
        if began < self._next_reading:
            return self.library
        try:
            now = self.library.current()
        except SearchError:
            if self.library.is_removed:
                raise
            # What was read before is true as far as it goes.
            now = self.library
        if now is not self.library:
            self.library, self.count = now, now.count_of(**self._narrowed)
            self._readings += 1
        took = time.monotonic() - began
        self._next_reading = began + max(1.0, REST * took)
        return now

    def remember(self, data: bytes) -> str:
        """Remember an image to search by. Raises DataError where it is none."""
        header = read_header(data)
        with header.turn(ASKED_SIDE):
            image = shrunk(decode(header, ASKED_SIDE).image, ASKED_SIDE)
        name = digest_of_bytes(data)[:24]
        self._asked[name] = AskedImage(image, as_jpeg(shrunk(image)))
        self._asked.move_to_end(name)
        while len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)
        return name

    def preview(self, name: str) -> bytes | None:
        """An image to search by, small."""
        asked = self._asked.get(name)
        return asked.preview if asked else None
