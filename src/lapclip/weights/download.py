"""Files from the web, over plain https: goes on after a broken line, and keeps only what is whole and as it was
announced. No torch, and nothing but the standard library, so that a model by its name needs no extra.

A file that is not whole lies beside its place under a hidden name that ends in .unfinished and holds the beginning of
the digest that it is to have: the next process goes on with it, and never with a part of another version.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import io
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from lapclip.errors import WeightsError, first_line
from lapclip.paths import digest_of_file, open_own, parse_json, replace
from lapclip.progress import Progress
from lapclip.text import size

SECONDS = 20
"""To wait for the next byte."""
WAITS = (1, 2, 4, 8)
"""Seconds before each further try, as long as nothing comes."""
CHUNK = 1 << 20
LARGEST_LISTING, LARGEST_FILE = 10_000_000, 100_000_000_000
"""Bytes that are taken where nobody said how many there are."""
UNFINISHED = "unfinished"
AGAIN = "the same command again: it goes on where the line broke"
_FINAL = {400, 401, 403, 404, 405, 406, 410, 451}
"""Answers that no further try will change."""
_NO_RANGE = 416


class LineBroken(Exception):
    """The line broke, or the server wants to be left alone for a while: another try may do."""


@dataclass(frozen=True)
class RemoteFile:
    """A file that is to be fetched, and what is known of it before."""

    name: str
    address: str
    bytes: int | None
    digest: str
    """SHA-256 with 64 digits, or git's SHA-1 of a file with 40, as whoever has it announces it; empty where nobody
    does."""
    version: str = ""
    """What stands for the content where there is no digest."""
    most: int = LARGEST_FILE
    """Bytes that are taken where nobody says how many there are."""

    def part(self, folder: Path) -> Path:
        """Where it lies until it is whole."""
        return (
            folder / f".{self.name}.{(self.digest or self.version or 'unknown')[:16]}.{UNFINISHED}"
        )


def may(question: str) -> bool | None:
    """Whether a person at the terminal says yes; None where nobody can be asked."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def fetch_file(file: RemoteFile, folder: Path, progress: Progress | None = None) -> str:
    """Fetch a file into a folder, or the rest of it; its SHA-256. WeightsError where it cannot be had whole and as it
    was announced: then nothing of it is kept but an honest beginning."""
    part = file.part(folder)
    for other in folder.glob(f".{file.name}.*.{UNFINISHED}"):
        if other != part:
            other.unlink(missing_ok=True)
    tries = 0
    while not _is_whole(file, part):
        before = _length(part)
        try:
            _take(file, part, progress)
            if file.bytes is None:
                break
        except ValueError as error:
            part.unlink(missing_ok=True)
            raise WeightsError(f"{file.address} is no file of a model: {error}.") from None
        except LineBroken as broken:
            tries = 0 if _length(part) - before >= CHUNK else tries + 1
            if tries > len(WAITS):
                came = (
                    f" {size(_length(part))} of {size(file.bytes)} came." if _length(part) else ""
                )
                host = urlsplit(file.address).netloc
                raise WeightsError(
                    f"{file.name} could not be fetched from {host}: {broken}.{came}", hint=AGAIN
                ) from None
            time.sleep(WAITS[max(tries - 1, 0)])
    found = digest_of_file(part)
    if file.digest and file.digest != (found if len(file.digest) == 64 else _git_digest(part)):
        part.unlink()
        raise WeightsError(
            f"What came from {urlsplit(file.address).netloc} is not {file.name} as it was announced: its digest begins "
            f"with {found[:12]} instead of {file.digest[:12]}. Nothing of it was kept.",
            hint="the same command again; if it happens twice, somebody between here and there changes files",
        )
    replace(part, folder / file.name)
    return found


def fetch_json(address: str) -> Any:
    """What an address says, as JSON. No other computer than that of the address may answer."""
    for wait in (*WAITS[:2], None):
        try:
            with (
                _opened(address, {"Accept": "application/json"}, same_host=True) as answer,
                io.BytesIO() as content,
            ):
                length = answer.headers.get("Content-Length", "")
                _copy(
                    answer,
                    content,
                    0,
                    int(length) if length.isdigit() else None,
                    most=LARGEST_LISTING,
                )
                return parse_json(content.getvalue().decode("utf-8"))
        except LineBroken as broken:
            if wait is None:
                raise WeightsError(
                    f"{urlsplit(address).netloc} cannot be reached: {broken}.",
                    hint="the same command when online",
                ) from None
            time.sleep(wait)
        except ValueError as error:
            raise WeightsError(
                f"{address} does not answer as a model hub does: {first_line(error)}.",
                hint="the same command on another network; one that wants a login first answers for others",
            ) from None
    raise AssertionError("the last try ends it")


def headers_of(address: str) -> http.client.HTTPMessage:
    """What a server says of a file without sending it, and without going where it points; nothing where it does not."""
    try:
        with _opened(
            address, {"Accept-Encoding": "identity"}, method="HEAD", follow=False
        ) as answer:
            return answer.headers
    except (LineBroken, WeightsError):
        return http.client.HTTPMessage()


def _take(file: RemoteFile, part: Path, progress: Progress | None) -> None:
    """Append to what is there all that comes until the line ends or breaks."""
    have = _length(part)
    asked = {"Range": f"bytes={have}-"} if have else {}
    with _opened(
        file.address, {"Accept-Encoding": "identity", **asked}, same_host=not file.digest
    ) as answer:
        if answer.status == _NO_RANGE:
            part.unlink(missing_ok=True)
            raise LineBroken("it has fewer bytes than came before")
        if "text/html" in answer.headers.get("Content-Type", ""):
            raise WeightsError(
                f"{urlsplit(file.address).netloc} answers with a web page instead of {file.name}.",
                hint="a network that wants a login does that: open any page in a browser, then the same command",
            )
        if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(
            f"bytes {have}-"
        ):
            have = 0  # the whole file comes
        length = answer.headers.get("Content-Length", "")
        whole = have + int(length) if length.isdigit() else None
        if file.bytes is not None and whole is not None and whole != file.bytes:
            part.unlink(missing_ok=True)
            raise WeightsError(
                f"{file.name} has {file.bytes:,} bytes, and {urlsplit(file.address).netloc} offers {whole:,}: it is "
                "another file, and was not taken.",
                hint="the same command later, or on another network",
            )
        with _appending(part, keep=have) as out:
            try:
                _copy(
                    answer,
                    out,
                    have,
                    file.bytes if file.bytes is not None else whole,
                    progress,
                    file.most,
                )
            except ValueError:
                part.unlink(missing_ok=True)
                raise WeightsError(
                    f"{urlsplit(file.address).netloc} sends more than {file.most:,} bytes of {file.name}: it is "
                    "another file, and was not taken.",
                    hint="the same command later, or on another network",
                ) from None


def _copy(
    answer: http.client.HTTPResponse,
    out: IO[bytes],
    have: int,
    whole: int | None,
    progress: Progress | None = None,
    most: int = LARGEST_FILE,
) -> None:
    """All bytes of an answer, and no more than the file has."""
    while whole is None or have < whole:
        try:
            chunk = answer.read1(CHUNK if whole is None else min(CHUNK, whole - have))
        except (OSError, http.client.HTTPException) as error:
            raise LineBroken(_why(error)) from None
        if not chunk:
            break
        have += len(chunk)
        if have > most:
            raise ValueError("it does not end")
        out.write(chunk)
        if progress and whole:
            progress(have, whole)
    if whole is not None and have < whole:
        raise LineBroken("the line broke")


@contextmanager
def _appending(part: Path, keep: int) -> Iterator[IO[bytes]]:
    """The file of a part, cut to what is kept of it. A full disk is said with what to do."""
    try:
        with open_own(part, "ab") as out:
            out.truncate(keep)
            yield out
    except OSError as error:
        raise WeightsError(
            f"{part} cannot be written: {error.strerror or first_line(error)}.",
            hint=f"free some disk space, or LAPCLIP_CACHE for another folder; then {AGAIN}",
        ) from None


@contextmanager
def _opened(
    address: str,
    headers: dict[str, str],
    *,
    method: str = "GET",
    same_host: bool = False,
    follow: bool = True,
) -> Iterator[http.client.HTTPResponse]:
    """An answer. LineBroken where another try may do, WeightsError where not."""
    request = urllib.request.Request(
        address, headers={"User-Agent": "lapclip", **headers}, method=method
    )
    if urlsplit(address).scheme not in ("http", "https"):
        raise WeightsError(f"{address} is no address of the web.", hint="https://...")
    handlers = [
        _Redirects(same_host=same_host, follow=follow),
        urllib.request.HTTPSHandler(context=_certificates()),
    ]
    try:
        answer = urllib.request.build_opener(*handlers).open(request, timeout=SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == _NO_RANGE or (not follow and 300 <= error.code < 400):
            answer = error
        elif 300 <= error.code < 400:
            raise _sent_elsewhere(
                request.full_url, error.headers.get("Location", "nowhere")
            ) from None
        elif error.code in _FINAL:
            error.close()
            where = urlsplit(address).netloc
            raise WeightsError(
                f"{where} does not give {address}: it answers {error.code} {error.reason}.",
                hint="the same command later; lapclip models lists others",
            ) from None
        else:
            error.close()
            raise LineBroken(f"it answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise LineBroken(_why(error)) from None
    with answer:
        yield answer  # pyright: ignore[reportReturnType]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Goes along to another place only as safely as before: from https to https, and for what nobody announced a digest
    of, to the same computer alone."""

    def __init__(self, *, same_host: bool, follow: bool) -> None:
        self.same_host, self.follow = same_host, follow

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        here, there = urlsplit(req.full_url), urlsplit(newurl)
        if not self.follow:
            return None
        if there.scheme not in {"https", here.scheme} or (
            self.same_host and there.netloc != here.netloc
        ):
            raise _sent_elsewhere(req.full_url, newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _sent_elsewhere(here: str, there: str) -> WeightsError:
    place = urlsplit(there)
    return WeightsError(
        f"{urlsplit(here).netloc} sends us to {place.scheme}://{place.netloc}, where its answer is not to be trusted.",
        hint="the same command on another network; one that wants a login first does that",
    )


def _certificates() -> ssl.SSLContext:
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if paths.cafile is None and paths.capath is None and sys.platform != "win32":
        # Python from python.org for macOS comes without; certifi is there wherever pip packages of the web are.
        if importlib.util.find_spec("certifi"):
            import certifi

            context.load_verify_locations(certifi.where())
    return context


def _why(error: BaseException) -> str:
    """What is wrong with a line, in a few words."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"no byte came for {SECONDS} s"
    return first_line(
        reason if isinstance(reason, BaseException) else Exception(str(reason))
    ).strip(" .:")


def _is_whole(file: RemoteFile, part: Path) -> bool:
    have = _length(part)
    if file.bytes is not None and have > file.bytes:
        part.unlink()
        return False
    return file.bytes is not None and have == file.bytes and part.exists()


def _length(part: Path) -> int:
    with suppress(OSError):
        return part.stat().st_size
    return 0


def _git_digest(path: Path) -> str:
    """What git calls a file of this content."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with open_own(path) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
