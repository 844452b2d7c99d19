"""Images by their https address, for `lapclip serve --allow-urls`.

Whoever sends an address chooses where this computer connects to, and it can reach what the sender cannot. So: https on
port 443 alone, where other services do not listen; every address that the name has must be one of the public internet,
and the connection goes to an address that was checked, never to what a second look at the name gives; the certificate
must be the name's; a redirect is a new address and is checked like the first. Proxies, passwords and cookies are not
used. Time, bytes and the number of fetches are limited, and a refusal does not tell a private name from one that does
not exist.

`ask` and `read` are plain HTTP with a deadline for the whole exchange; Immich's upstream is asked with them too.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import ipaddress
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

from lapclip import __version__
from lapclip.serving.items import LARGEST_IMAGE, ImageAddress, ImageFile, Item, Loaded
from lapclip.serving.refusals import BadItem, Refusal, TooLarge, TooMany, Unavailable

SECONDS = 10.0
"""From the start of a fetch to its last byte, names that are looked up and redirects included."""
AT_ONCE = 8
"""Fetches that run at the same time."""
MOST_WAITING = 512
"""Fetches that may wait or run; beyond it requests are refused at once."""
MOST_LOOKUPS = 32
"""Names that are looked up at the same time. The system sets no end to that, so some may go on though nobody waits."""
MOST_REDIRECTS = 3
MOST_ADDRESSES = 4
"""Addresses of one name that are tried."""
LONGEST_ADDRESS = 2000
PORT = 443
TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
"""Content types that are read; stores of files often know none, and send the second or third."""
REDIRECTS = (301, 302, 303, 307, 308)
PATIENCE = 1.0
"""Seconds after which a thread that waits for bytes looks whether they are still wanted."""

# The special-purpose registries of IANA. `ipaddress` knows most of them, but not in each version of Python.
_NOT_PUBLIC_4 = [
    ipaddress.ip_network(network)
    for network in (
        *(
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
        ),
        *(
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
        ),
        "224.0.0.0/3",
    )
]
_UNICAST_6 = ipaddress.ip_network("2000::/3")
"""All that is given out. Outside of it: loopback, link-local, private, multicast, IPv4 inside IPv6, and NAT64."""
_NOT_PUBLIC_6 = [
    ipaddress.ip_network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]
"""Within it: Teredo and other protocols, documentation, 6to4."""


def is_public(address: str) -> bool:
    """Whether an IP address belongs to one host of the public internet."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # such as one with a zone: those are link-local
        return False
    if not found.is_global or found.is_multicast:
        return False
    if found.version == 4:
        return not any(found in network for network in _NOT_PUBLIC_4)
    return found in _UNICAST_6 and not any(found in network for network in _NOT_PUBLIC_6)


class GivenUp(Exception):
    """Nobody waits any more."""


class Wire:
    """A connected socket for `http.client`, whose reads and writes all end at one deadline."""

    def __init__(self, sock: socket.socket, deadline: float, given_up: threading.Event) -> None:
        self._sock, self._deadline, self._given_up = sock, deadline, given_up

    def left(self) -> float:
        """Seconds until the deadline."""
        if self._given_up.is_set():
            raise GivenUp
        return seconds_left(self._deadline)

    def sendall(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), 1 << 18):
            self._sock.settimeout(self.left())
            self._sock.sendall(view[begin : begin + (1 << 18)])

    def makefile(self, mode: str, *_: Any, **__: Any) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self))

    def receive(self, buffer: Any) -> int:
        while True:
            self._sock.settimeout(min(PATIENCE, self.left()))
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                continue  # unless the deadline has passed, which `left` says

    def close(self) -> None:
        """Whoever connected the socket closes it: an answer is read after `http.client` has let go of it."""


class _Reader(io.RawIOBase):
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._wire.receive(buffer)


def seconds_left(deadline: float) -> float:
    """Seconds until a deadline by `time.monotonic`; raises where there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def ask(
    wire: Wire, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
) -> http.client.HTTPResponse:
    """Send a request and read the head of its answer. One request for each connection."""
    connection = http.client.HTTPConnection("")
    connection.sock = cast(socket.socket, wire)
    connection.request(method, path, body, {"Connection": "close", **headers})
    return connection.getresponse()


def read(
    response: http.client.HTTPResponse,
    most: int,
    arrived: Callable[[int], None] = lambda size: None,
) -> bytes:
    """The body of an answer. `arrived` hears of each piece and may raise."""
    too_large = TooLarge(f"it has more than {most // 10**6} MB.")
    if (response.length or 0) > most:  # as announced
        raise too_large
    chunks: list[bytes] = []
    total = 0
    while chunk := response.read(1 << 16):
        chunks.append(chunk)
        arrived(len(chunk))
        total += len(chunk)
        if total > most:
            raise too_large
    if response.length:  # what is missing
        raise http.client.IncompleteRead(b"")
    return b"".join(chunks)


class Fetcher:
    """Fetches the images of requests: a few at once, in threads of its own, so that slow servers hold up nobody who
    sends bytes."""

    def __init__(self, request_bytes: int, all_bytes: int) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, "lapclip-fetch")
        self._tls = ssl.create_default_context()
        self._waiting = 0
        self._rooms = _Rooms(request_bytes, all_bytes)

    @asynccontextmanager
    async def fetched(self, items: Sequence[Item], deadline: float) -> AsyncIterator[list[Loaded]]:
        """The items, with images in place of addresses, for as long as the block lasts.

        Raises a `Refusal` with the position of what could not be fetched; the rest is given up then.
        """
        count = sum(isinstance(item, ImageAddress) for item in items)
        if self._waiting and self._waiting + count > MOST_WAITING:
            raise TooMany(f"{self._waiting:,} images wait to be fetched.", retry_after=SECONDS / 2)
        loop, room = asyncio.get_running_loop(), _Room(self._rooms)
        self._waiting += count
        futures = {
            position: loop.run_in_executor(self._threads, self._fetch, item.url, deadline, room)
            for position, item in enumerate(items)
            if isinstance(item, ImageAddress)
        }
        try:
            await asyncio.wait(
                futures.values(),
                timeout=max(0.0, deadline - time.monotonic()),
                return_when=asyncio.FIRST_EXCEPTION,
            )
            for position, future in futures.items():
                if future.done() and (error := future.exception()) is not None:
                    if isinstance(error, Refusal) and error.position is None:
                        error.position = position
                    raise error
            if not all(future.done() for future in futures.values()):
                raise Unavailable("The images were not fetched before the deadline.")
            self._waiting -= count
            count = 0
            yield [
                item if not isinstance(item, ImageAddress) else futures[at].result()
                for at, item in enumerate(items)
            ]
        finally:
            self._waiting -= count
            room.give_up()
            for future in futures.values():
                future.cancel()
                if future.done() and not future.cancelled():
                    future.exception()  # seen: asyncio would else log it

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, url: str, deadline: float, room: _Room) -> ImageFile:
        """In a thread."""
        deadline = min(deadline, time.monotonic() + SECONDS)
        try:
            for _ in range(MOST_REDIRECTS + 1):
                found = self._follow(url, deadline, room)
                if isinstance(found, bytes):
                    return ImageFile(found)
                url = found
        except TimeoutError:
            raise BadItem(f"it was not fetched within {SECONDS:.0f} seconds.") from None
        except ssl.SSLCertVerificationError:
            raise BadItem(
                "its server has no certificate for this name that is trusted here."
            ) from None
        except (OSError, http.client.HTTPException, ValueError):
            raise BadItem("its server could not be reached, or broke off.") from None
        raise BadItem(f"it is redirected more than {MOST_REDIRECTS} times.")

    def _follow(self, url: str, deadline: float, room: _Room) -> bytes | str:
        """The bytes at an address, or the address that it is redirected to."""
        host, path, written_host = _parts(url)
        with self._connect(host, deadline) as sock:
            headers = {
                "Host": written_host,
                "User-Agent": f"lapclip/{__version__}",
                "Accept": "image/*",
                "Accept-Encoding": "identity",
            }
            response = ask(Wire(sock, deadline, room.given_up), "GET", path, headers)
            if response.status in REDIRECTS:
                return urljoin(url, response.headers.get("Location", ""))
            if response.status != 200:
                raise BadItem(f"its server answered with status {response.status}.")
            if not response.headers.get("Content-Type", TYPES[0]).lower().startswith(TYPES):
                raise BadItem("its server sent something that is no image.")
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise BadItem("its server sent it compressed, which was not asked for.")
            return read(response, LARGEST_IMAGE, room.take)

    def _connect(self, host: str, deadline: float) -> ssl.SSLSocket:
        """A connection to an address that was checked, whose certificate is for the name."""
        addresses = _addresses(host, deadline)[:MOST_ADDRESSES]
        for tries, (family, address) in enumerate(addresses):
            try:
                sock = _open(family, address, seconds_left(deadline) / (len(addresses) - tries))
            except OSError:
                continue
            try:
                sock.settimeout(seconds_left(deadline))
                return self._tls.wrap_socket(sock, server_hostname=host)
            except BaseException:
                sock.close()
                raise
        seconds_left(deadline)
        raise ConnectionError


def _open(family: socket.AddressFamily, address: Any, seconds: float) -> socket.socket:
    """A connection to an IP address; names are not looked up here."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _parts(url: str) -> tuple[str, str, str]:
    """The host of an address, the path to ask there, and the host as it was written."""
    if len(url) > LONGEST_ADDRESS or not re.fullmatch("[!-~]+", url):
        raise BadItem(
            "its address is too long, or has characters that an address has to write in percent signs."
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise BadItem("its address is not valid.") from None
    if parts.scheme != "https" or not host or port not in (None, PORT):
        raise BadItem(f"only https addresses on port {PORT} are fetched.")
    if "@" in parts.netloc:
        raise BadItem("addresses with a name or a password are not fetched.")
    return host, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), parts.netloc


_lookups = threading.BoundedSemaphore(MOST_LOOKUPS)


def _look_up(host: str, deadline: float) -> list[Any]:
    """What a name leads to; nothing where there is no such name. In a thread, which is left behind at the deadline."""
    answer: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def look() -> None:
        found: list[Any] = []
        try:
            found = socket.getaddrinfo(host, PORT, type=socket.SOCK_STREAM)
        except (OSError, ValueError):
            pass
        finally:
            _lookups.release()
            answer.put(found)

    timeout = seconds_left(deadline)
    if not _lookups.acquire(blocking=False):
        raise Unavailable("Too many names of hosts are being looked up.")
    try:
        threading.Thread(target=look, name="lapclip-lookup", daemon=True).start()
    except RuntimeError:  # no more threads
        _lookups.release()
        raise Unavailable("Too many names of hosts are being looked up.") from None
    try:
        return answer.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError from None


def _addresses(host: str, deadline: float) -> list[tuple[socket.AddressFamily, Any]]:
    """Where a host is, if all of that is public."""
    found = _look_up(host, deadline)
    if not found or not all(is_public(str(entry[4][0])) for entry in found):
        raise BadItem("its host has no address, or not only addresses of the public internet.")
    return [(entry[0], entry[4]) for entry in found]


class _Rooms:
    """Bytes that one request, and all together, may have fetched and still hold."""

    def __init__(self, each: int, total: int) -> None:
        self.each, self.total, self.taken = each, total, 0
        self.lock = threading.Lock()


class _Room:
    """The bytes that the images of one request take, until it is given up or done."""

    def __init__(self, rooms: _Rooms) -> None:
        self._rooms, self._taken = rooms, 0
        self.given_up = threading.Event()

    def take(self, size: int) -> None:
        rooms = self._rooms
        with rooms.lock:
            if self.given_up.is_set():
                raise GivenUp
            if self._taken + size > rooms.each:
                raise TooLarge(
                    f"the images of one request may have {rooms.each // 10**6} MB together."
                )
            if rooms.taken + size > rooms.total:
                raise Unavailable("Too many bytes are on their way to this server.")
            self._taken += size
            rooms.taken += size

    def give_up(self) -> None:
        with self._rooms.lock:
            self.given_up.set()
            self._rooms.taken -= self._taken
            self._taken = 0
