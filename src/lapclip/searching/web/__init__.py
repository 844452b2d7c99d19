"""`lapclip search FOLDER --web`: one page on this machine that finds the images of a folder, from its start to Ctrl-C.

Questions       what can be asked of the library (words, an image of the index, an image from elsewhere, or just the
                newest), a page of the answer at a time
Application     which address answers what
images          the images of the index, small and whole, and no other files
static/         the page

What it shares with other pages (address, security, look) is in lapclip.web. The addresses:

GET  /                         the page
GET  /search?words=a+red+cat   the images that fit, a page at a time; also ?like=17 and ?image=ID; else the newest
POST /asked                    takes an image to search by, and answers its ID
GET  /asked/ID                 that image, small
GET  /images/17                what is known of an image
GET  /images/17/small          an image of the index, small
GET  /images/17/whole          the same, whole
GET  /page.css, ...            what the page loads
"""

from __future__ import annotations

import asyncio
import html
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar
from urllib.parse import urlencode

from PIL import Image
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lapclip.data.decode import decode
from lapclip.errors import DataError, LapclipError, SearchError
from lapclip.machine.facts import logical_cores
from lapclip.paths import digest_of_bytes, read_bytes
from lapclip.searching.library import Answer, Entry, Library
from lapclip.searching.query import excluded, parse
from lapclip.searching.web.images import Images, Sent, as_jpeg, shrunk
from lapclip.text import to_json
from lapclip.web.server import Announcement, answer_file, page_files, serve_until_interrupted

PORT = 8865
"""Not that of `watch --web`: an address that was opened before should not show another page."""
STATIC = Path(__file__).parent / "static"
A_MINUTE = 60
LARGEST_ASKED = 50_000_000
"""Bytes of the largest image to search by."""
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

GONE = "Whoever asked has gone."
NO_SUCH_IMAGE = "There is no image of this number."

Result = TypeVar("Result")


def serve(
    library: Library,
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    query: str = "",
    like: Path | None = None,
    since: float | None = None,
    exclude: Sequence[str] = (),
    output: TextIO | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page until Ctrl-C. It opens on words or an image, and shows no images that are older or left out.

    Without a port: 8865, or the next free one.
    """
    application = Application(library, since, exclude)
    first = {"image": _remember(application, like)} if like else {"words": query} if query else {}
    words = Announcement(
        command="lapclip search FOLDER --web",
        title=f"{application.questions.count:,} images can be found at",
        shared="Who has this address can look at the images of this folder.",
        ending="Ctrl-C ends the page; the index stays.",
        fragment=urlencode(first),
    )
    with library.model.which.in_use():
        serve_until_interrupted(
            application.routed(), words, host, port, PORT, output=output, ready=ready
        )


def _remember(application: Application, image: Path) -> str:
    try:
        return application.questions.remember(read_bytes(image))
    except OSError as error:
        raise DataError(f"{image} cannot be read: {error.strerror or error}.") from None
    except DataError as error:
        raise DataError(
            f"{image} cannot be read as an image: {error.message}.", hint=error.hint
        ) from None


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

    def __init__(
        self, library: Library, since: float | None = None, exclude: Sequence[str] = ()
    ) -> None:
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
            page, like = (
                int(given.get("page", "0")),
                int(given["like"]) if "like" in given else None,
            )
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
        return (self._since is None or time >= self._since) and not excluded(
            entry.path, self._exclude
        )

    def answer(self, question: Question) -> dict[str, Any]:
        """A page of the images, how many there are, how long it took, and which reading of the index that is."""
        began, library = time.perf_counter(), self._read_again()
        chosen = {"limit": PAGE, "offset": question.page * PAGE, **self._narrowed}
        if question.image:
            found = Answer(library.like_image(question.image.image, **chosen))
        elif question.like is not None:
            known = library.entry(question.like)
            found = Answer(
                library.like(question.like, **chosen) if known and self.shows(known) else []
            )
        elif question.words:
            found = library.ask(parse(question.words), **chosen)
        else:
            found = Answer(library.newest(**chosen))
        hits = found.hits
        total = (
            library.count_of(**self._narrowed, without=question.like)
            if hits or question.page
            else 0
        )
        scored = bool(question.image or question.words) or question.like is not None
        return {
            "results": [
                {
                    "number": hit.number,
                    "name": hit.path.name,
                    "score": round(hit.score, 4) if scored else None,
                    "bar": None if hit.bar is None else round(hit.bar, 3),
                }
                for hit in hits
            ],
            "correction": found.correction,
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
        image = shrunk(decode(data, ASKED_SIDE).image, ASKED_SIDE)
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


class Application:
    """Answers to the page."""

    def __init__(
        self, library: Library, since: float | None = None, exclude: Sequence[str] = ()
    ) -> None:
        self._library, self._images = library, Images(library)
        self.questions = Questions(library, since, exclude)
        self._files = page_files(STATIC)
        self._asking = asyncio.Lock()
        # One core is left to the questions: images come a little later, typing never waits for them.
        self._decoding = asyncio.Semaphore(max(1, min(4, logical_cores() - 1)))

    def routed(self) -> ASGIApp:
        """The application with its addresses."""
        routes = [
            Route("/", self._page),
            Route("/search", self._search),
            Route("/asked", self._ask, methods=["POST"]),
            Route("/asked/{name}", self._asked),
            Route("/images/{number:int}", self._about),
            Route("/images/{number:int}/small", self._small),
            Route("/images/{number:int}/whole", self._whole),
            Route("/{file}", self._file),
        ]
        app = Starlette(routes=routes)
        app.router.redirect_slashes = False
        return app

    async def _page(self, request: Request) -> Response:
        folder = self._library.folder
        facts: dict[str, Any] = {
            "name": folder.name or folder.anchor,
            "count": self.questions.count,
        }
        facts["notes"] = self._library.model_notes()
        text = (
            (STATIC / "page.html")
            .read_text(encoding="utf-8")
            .replace("{{facts}}", html.escape(to_json(facts)))
        )
        return Response(text.encode(), media_type="text/html; charset=utf-8")

    async def _search(self, request: Request) -> Response:
        try:
            question = self.questions.read(request.query_params)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return _as_json(
            await self._in_turn(request, self._asking, lambda: self.questions.answer(question))
        )

    async def _ask(self, request: Request) -> Response:
        data = await _body(request)
        return _as_json(
            {
                "image": await self._in_turn(
                    request, self._decoding, lambda: self.questions.remember(data)
                )
            }
        )

    async def _asked(self, request: Request) -> Response:
        preview = self.questions.preview(request.path_params["name"])
        if preview is None:
            raise HTTPException(404)
        return Response(preview, media_type="image/jpeg")

    async def _about(self, request: Request) -> Response:
        return _as_json(self._facts(await self._entry(request)))

    async def _small(self, request: Request) -> Response:
        return await self._image(request, self._images.small)

    async def _whole(self, request: Request) -> Response:
        return await self._image(request, self._images.whole)

    async def _file(self, request: Request) -> Response:
        path = self._files.get(request.path_params["file"])
        if path is None:
            raise HTTPException(404)
        return answer_file(request, path)

    async def _image(self, request: Request, read: Callable[[Entry], Sent | None]) -> Response:
        entry = await self._entry(request)
        headers = {"ETag": f'"{entry.digest}"', "Cache-Control": f"private, max-age={A_MINUTE}"}
        known = request.headers.get("if-none-match") == headers["ETag"]
        if known and await asyncio.to_thread(self._images.is_there, entry):
            return Response(status_code=304, headers=headers)
        sent = await self._in_turn(request, self._decoding, lambda: read(entry))
        if sent is None:
            raise HTTPException(404, "The file is gone, or was changed since it was indexed.")
        return Response(sent.data, media_type=sent.kind, headers=headers)

    async def _entry(self, request: Request) -> Entry:
        number = request.path_params["number"]
        if number >= LARGEST_NUMBER:
            raise HTTPException(404, NO_SUCH_IMAGE)
        # In a thread, because another process may be writing the index.
        entry = await asyncio.to_thread(_or_refuse, lambda: self.questions.library.entry(number))
        if entry is None or not self.questions.shows(entry):
            raise HTTPException(404, NO_SUCH_IMAGE)
        return entry

    def _facts(self, entry: Entry) -> dict[str, Any]:
        return {
            "number": entry.number,
            "name": os.path.basename(entry.path),
            "path": entry.path,
            "bytes": entry.bytes,
            "width": entry.width,
            "height": entry.height,
            "taken": entry.taken,
            "modified": entry.modified / 1e9,
        }

    async def _in_turn(
        self, request: Request, turn: asyncio.Lock | asyncio.Semaphore, work: Callable[[], Result]
    ) -> Result:
        """Work in a thread, once it is this request's turn; none for those who went away meanwhile."""
        async with turn:
            if await request.is_disconnected():
                raise HTTPException(499, GONE)
            return await asyncio.to_thread(_or_refuse, work)


def _or_refuse(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except LapclipError as error:
        raise HTTPException(400, error.message) from None


def _as_json(values: Any) -> Response:
    return Response(to_json(values), media_type="application/json")


async def _body(request: Request) -> bytes:
    """What was sent, as long as it is not too much."""
    chunks, size = list[bytes](), 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > LARGEST_ASKED:
                raise HTTPException(
                    413, f"An image to search by has at most {LARGEST_ASKED // 10**6} MB."
                )
            chunks.append(chunk)
    except ClientDisconnect:
        raise HTTPException(499, GONE) from None
    return b"".join(chunks)
