"""The page of `lapclip search FOLDER --web`, from its start to Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO
from urllib.parse import urlencode

from lapclip.errors import DataError
from lapclip.web.server import Announcement, serve_until_interrupted

if TYPE_CHECKING:
    from lapclip.searching.library import Library
    from lapclip.searching.web.app import Application

PORT = 8865
"""Not that of `watch --web`: an address that was opened before should not show another page."""


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
    # Here, so that the command's help does not wait for the modules of the web server.
    from lapclip.searching.web.app import Application

    application = Application(library, since, exclude)
    first = {"image": _remember(application, like)} if like else {"words": query} if query else {}
    words = Announcement(
        command="lapclip search FOLDER --web",
        title=f"{library.count:,} images can be found at",
        shared="Who has this address can look at the images of this folder.",
        ending="Ctrl-C ends the page; the index stays.",
        fragment=urlencode(first),
    )
    serve_until_interrupted(application.routed(), words, host, port, PORT, output=output, ready=ready)


def _remember(application: Application, image: Path) -> str:
    try:
        return application.questions.remember(image.read_bytes())
    except OSError as error:
        raise DataError(f"{image} cannot be read: {error.strerror or error}.") from None
    except DataError as error:
        raise DataError(f"{image} cannot be read as an image: {error.message}.", hint=error.hint) from None
