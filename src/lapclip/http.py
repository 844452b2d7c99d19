"""HTTP requests, on httpx2: to servers that the user names, and to addresses that strangers send.

Whoever sends an address chooses where this computer connects to, and it can reach what the sender
cannot. So `fetch_public` takes https on port 443 only, where other services do not listen. Every
address of the host must be on the public internet, and the connection goes to an address that was
checked, never to the result of a second lookup. The certificate must be the host's. A redirect is a
new address and is checked like the first. Proxies, passwords and cookies are not used. An error
does not tell a private host from one that does not exist.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

import httpx2

from lapclip import __version__

# A connection for each request; content as it is, because a small answer may unpack to a large one.
HEADERS = {
    "User-Agent": f"lapclip/{__version__}",
    "Accept-Encoding": "identity",
    "Connection": "close",
}
MAX_REDIRECTS = 3
MAX_ADDRESSES = 4  # of one host that are tried
MAX_LOOKUPS = 32  # at the same time; a lookup has no time limit and may outlive its request
MAX_URL_LENGTH = 2000
HTTPS_PORT = 443
REDIRECTS = (301, 302, 303, 307, 308)

# IANA's special-purpose registries. `ipaddress` knows most of them, but not in each Python version.
PRIVATE_4 = """0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12
192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24
224.0.0.0/3"""
# All that is given out. Outside of it: loopback, link-local, private, multicast, IPv4 inside IPv6.
UNICAST_6 = ipaddress.ip_network("2000::/3")
# Within it: Teredo and other protocols, documentation, 6to4.
PRIVATE_6 = "2001::/23 2001:db8::/32 2002::/16 3fff::/20"
PRIVATE_NETWORKS = [ipaddress.ip_network(text) for text in f"{PRIVATE_4} {PRIVATE_6}".split()]


class RequestFailed(Exception):
    """Reason why there is no answer, as the end of a sentence."""


class AnswerTooLarge(RequestFailed):
    """An answer has more bytes than are taken."""


class TooManyLookups(RequestFailed):
    """No further host can be looked up now."""


class Answer(NamedTuple):
    """Answer of a server."""

    status: int
    headers: httpx2.Headers
    content: bytes


@cache
def tls_context() -> ssl.SSLContext:
    """Return the context that trusts the system's certificates, read once."""
    return httpx2.create_ssl_context()


def server_url(text: str) -> httpx2.URL | None:
    """Return the address of a server, or None if a text is no such address."""
    try:
        _ = urlsplit(text).port  # ValueError for brackets and ports that are none
        url = httpx2.URL(text)
    except (ValueError, httpx2.InvalidURL):
        return None
    if url.scheme not in ("http", "https") or not url.host:
        return None
    return url


class Session:
    """Requests to one server over a kept connection. Threads need one each."""

    def __init__(self, url: httpx2.URL, path: str, timeout_seconds: float) -> None:
        """Put `path` before the paths of requests. Leave out a query and a password in `url`."""
        base_url = httpx2.URL(scheme=url.scheme, host=url.host, port=url.port, path=path)
        self._client = httpx2.Client(
            base_url=base_url,
            verify=tls_context(),
            timeout=timeout_seconds,
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
        )

    def request(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        """Send a request, a second time if the server had closed the kept connection."""
        try:
            return self._request(method, path, content, headers)
        except (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError):
            pass
        except httpx2.HTTPError as error:
            raise RequestFailed(_reason(error)) from None
        try:
            return self._request(method, path, content, headers)
        except httpx2.HTTPError as error:
            raise RequestFailed(_reason(error)) from None

    def _request(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        response = self._client.request(method, path, content=content, headers=headers)
        return Answer(response.status_code, response.headers, response.content)

    def close(self) -> None:
        self._client.close()


async def post(
    url: httpx2.URL, content: bytes, headers: Mapping[str, str], *, max_bytes: int
) -> Answer:
    """Send a request over a connection of its own. The caller limits its time."""
    try:
        async with (
            httpx2.AsyncClient(verify=tls_context(), trust_env=False, timeout=None) as client,
            client.stream("POST", url, content=content, headers=_as_sent(headers)) as response,
        ):
            body = await _read(response, max_bytes)
            return Answer(response.status_code, response.headers, body)
    except httpx2.HTTPError as error:
        raise RequestFailed(_reason(error)) from None


def _as_sent(headers: Mapping[str, str]) -> httpx2.Headers:
    """Return headers whose values may have any character of Latin-1, as those of a request have."""
    return httpx2.Headers({**HEADERS, **headers}, encoding="latin-1")


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to one host on the public internet."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if not found.is_global or found.is_multicast:
        return False
    if any(found in network for network in PRIVATE_NETWORKS):
        return False
    return found.version == 4 or found in UNICAST_6


async def fetch_public(
    url: str,
    tls: ssl.SSLContext,
    *,
    content_types: tuple[str, ...],
    max_bytes: int,
    seconds: float,
    on_bytes: Callable[[int], None],
) -> bytes:
    """Return the content at an address that a stranger sent.

    `seconds` covers lookups and redirects as well. `on_bytes` is called with the size of each piece
    and may raise.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        async with asyncio.timeout_at(deadline):
            for _ in range(MAX_REDIRECTS + 1):
                host, path, written_host = _checked_parts(url)
                addresses = await _public_addresses(host)
                async with httpx2.AsyncHTTPTransport(verify=tls, trust_env=False) as transport:
                    response = await _connect(
                        transport, addresses, host, path, written_host, deadline
                    )
                    try:
                        if response.status_code in REDIRECTS:
                            url = urljoin(url, response.headers.get("Location", ""))
                            continue
                        _check_head(response, content_types)
                        return await _read(response, max_bytes, on_bytes)
                    finally:
                        await response.aclose()
    except TimeoutError:
        raise RequestFailed(f"it was not fetched within {seconds:.0f} seconds.") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        if _is_certificate_error(error):
            reason = "its server has no certificate for this name that is trusted here."
        else:
            reason = "its server could not be reached, or broke off."
        raise RequestFailed(reason) from None
    raise RequestFailed(f"it is redirected more than {MAX_REDIRECTS} times.")


def _checked_parts(url: str) -> tuple[str, str, str]:
    """Return the host of an address, its path with the query, and the host as written."""
    if len(url) > MAX_URL_LENGTH or not re.fullmatch("[!-~]+", url):
        raise RequestFailed(
            "its address is too long, or has characters that an address has to write in percent "
            "signs."
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise RequestFailed("its address is not valid.") from None
    if parts.scheme != "https" or not host or port not in (None, HTTPS_PORT):
        raise RequestFailed(f"only https addresses on port {HTTPS_PORT} are fetched.")
    if "@" in parts.netloc:
        raise RequestFailed("addresses with a name or a password are not fetched.")
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    return host, path, parts.netloc


async def _public_addresses(host: str) -> list[str]:
    """Return the IP addresses of a host, if all of them are public."""
    addresses = await _look_up(host)
    if not addresses or not all(map(is_public, addresses)):
        raise RequestFailed(
            "its host has no address, or not only addresses of the public internet."
        )
    return addresses[:MAX_ADDRESSES]


_lookups = threading.BoundedSemaphore(MAX_LOOKUPS)


async def _look_up(host: str) -> list[str]:
    """Return the IP addresses of a host, none if there is no such host.

    In a thread of its own, which is left behind if nobody waits any more: the system's lookup
    cannot be ended.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def deliver(addresses: list[str]) -> None:
        if not answer.done():
            answer.set_result(addresses)

    def look_up() -> None:
        addresses: list[str] = []
        try:
            entries = socket.getaddrinfo(host, HTTPS_PORT, type=socket.SOCK_STREAM)
            addresses = [str(entry[4][0]) for entry in entries]
        except (OSError, ValueError):
            pass
        finally:
            _lookups.release()
            with suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(deliver, addresses)

    if not _lookups.acquire(blocking=False):
        raise TooManyLookups("too many names of hosts are being looked up.")
    try:
        threading.Thread(target=look_up, name="lapclip-lookup", daemon=True).start()
    except RuntimeError:  # no more threads
        _lookups.release()
        raise TooManyLookups("too many names of hosts are being looked up.") from None
    return await answer


async def _connect(
    transport: httpx2.AsyncHTTPTransport,
    addresses: list[str],
    host: str,
    path: str,
    written_host: str,
    deadline: float,
) -> httpx2.Response:
    """Send a GET to the first checked address that answers. Return the head of the answer."""
    loop = asyncio.get_running_loop()
    for number, address in enumerate(addresses):
        seconds = (deadline - loop.time()) / (len(addresses) - number)
        request = httpx2.Request(
            "GET",
            httpx2.URL(scheme="https", host=address, raw_path=path.encode()),
            headers={**HEADERS, "Host": written_host, "Accept": "image/*"},
            extensions={
                "sni_hostname": host,  # the certificate must be the host's
                "timeout": httpx2.Timeout(None, connect=seconds).as_dict(),
            },
        )
        try:
            return await transport.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            if _is_certificate_error(error) or number == len(addresses) - 1:
                raise
    raise AssertionError("a host has at least one address")


def _check_head(response: httpx2.Response, content_types: tuple[str, ...]) -> None:
    """Raise unless an answer holds uncompressed content of one of the types."""
    if response.status_code != 200:
        raise RequestFailed(f"its server answered with status {response.status_code}.")
    content_type = response.headers.get("Content-Type", content_types[0])
    if not content_type.lower().startswith(content_types):
        raise RequestFailed("its server sent something that is no image.")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestFailed("its server sent it compressed, which was not asked for.")


async def _read(
    response: httpx2.Response, max_bytes: int, on_bytes: Callable[[int], None] | None = None
) -> bytes:
    """Return the body of an answer."""
    too_large = AnswerTooLarge(f"it has more than {max_bytes // 10**6} MB.")
    announced = response.headers.get("Content-Length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    total = 0
    async for chunk in response.aiter_raw():
        if on_bytes is not None:
            on_bytes(len(chunk))
        chunks.append(chunk)
        total += len(chunk)
        if total > max_bytes:
            raise too_large
    return b"".join(chunks)


def _is_certificate_error(error: BaseException | None) -> bool:
    """Return whether a certificate that is not trusted is behind an error."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(error: Exception) -> str:
    return str(error).strip(" .:") or type(error).__name__
