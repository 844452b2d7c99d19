"""Images by their address: a real TLS server here, and a name that seems to lead to a public address.

Only the edge of the network is replaced: what a name resolves to, and where a connection to a public address ends.
"""

from __future__ import annotations

import asyncio
import base64
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from lapclip import http
from lapclip.http import is_public
from lapclip.serving import fetch
from lapclip.serving.fetch import Fetcher
from lapclip.serving.items import ImageAddress

from ..conftest import wait_until
from .conftest import Reply, Serving, jpeg, serving

PUBLIC = "93.184.216.34"
NAME = "pictures.test"


class Pictures(ThreadingHTTPServer):
    """A server on the web; what it does is in the path."""

    daemon_threads = True

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.at_once = self.most_at_once = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Callers break off; that is what is tested."""


class Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        pictures = cast(Pictures, self.server)
        pictures.asked.append(
            (self.path, {name.lower(): value for name, value in self.headers.items()})
        )
        _, way, *rest = self.path.split("/", 2)
        getattr(self, "do_" + way)(*rest)

    def head(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def do_image(self, seed: str) -> None:
        self.head(Content_Type="image/jpeg")
        self.wfile.write(jpeg(int(seed)))

    def do_next(self, _: str) -> None:
        """Another image each time."""
        self.do_image(str(len(cast(Pictures, self.server).asked)))

    def do_to(self, location: str) -> None:
        self.head(302, Location=location)

    def do_hops(self, left: str) -> None:
        self.head(307, Location=f"/hops/{int(left) - 1}" if int(left) > 1 else "../image/1")

    def do_html(self) -> None:
        self.head(Content_Type="text/html")
        self.wfile.write(jpeg(1))

    def do_gzip(self) -> None:
        self.head(Content_Type="image/jpeg", Content_Encoding="gzip")

    def do_status(self, status: str) -> None:
        self.head(int(status), Content_Type="image/jpeg")

    def do_short(self) -> None:
        self.head(Content_Type="image/jpeg", Content_Length="100000")
        self.wfile.write(jpeg(1))

    def do_announced(self) -> None:
        self.head(Content_Type="image/jpeg", Content_Length="1000000000")
        self.connection.recv(1)  # until the caller has gone

    def do_endless(self) -> None:
        self.head(Content_Type="image/jpeg")
        while True:
            self.wfile.write(b"\0" * 10_000)

    def do_silent(self) -> None:
        self.connection.recv(1)

    def do_slow_head(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Long: ")
        self.trickle()

    def do_slow_body(self) -> None:
        self.head(Content_Type="image/jpeg")
        self.trickle()

    def trickle(self) -> None:
        while True:
            self.wfile.write(b"a")
            time.sleep(0.02)

    def do_together(self) -> None:
        pictures = cast(Pictures, self.server)
        pictures.at_once += 1
        pictures.most_at_once = max(pictures.most_at_once, pictures.at_once)
        time.sleep(0.1)
        pictures.at_once -= 1
        self.do_image("1")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class Network:
    """What names resolve to, and the addresses that were connected to."""

    def __init__(self, pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = {NAME: [PUBLIC], "other.test": [PUBLIC]}
        self.resolved: list[str] = []
        self.connected: list[str] = []
        self._port, self._really = pictures.server_port, socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self.resolve)
        self._connect = anyio.connect_tcp
        monkeypatch.setattr(anyio, "connect_tcp", self.connect)

    def resolve(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if port != 443:  # the tests' own requests
            return self._really(host, port, *args, **options)
        self.resolved.append(host)
        if not str(host).endswith(".test"):
            return self._really(host, port, *args, **options)
        if host not in self.names:
            raise socket.gaierror("no such name")
        return [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (address, port),
            )
            for address in self.names[host]
        ]

    async def connect(self, remote_host: str, remote_port: int, **_: Any) -> Any:
        self.connected.append(remote_host)
        assert is_public(remote_host)
        return await self._connect("127.0.0.1", self._port)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for `NAME`, with its key beside it."""
    if not (openssl := shutil.which("openssl")):
        pytest.skip("no openssl command to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        [
            *(
                openssl,
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-days", "2", "-keyout", "key.pem", "-out", "cert.pem", "-subj", f"/CN={NAME}"),
            *("-addext", f"subjectAltName=DNS:{NAME}"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder / "cert.pem"


@pytest.fixture(scope="module")
def pictures(certificate: Path) -> Iterator[Pictures]:
    server = Pictures(certificate, certificate.with_name("key.pem"))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def network(
    pictures: Pictures, fetching: Serving, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Network]:
    pictures.asked.clear()
    yield Network(pictures, monkeypatch)
    # A fetch that was given up may still be about to connect. It must not do so in the next test's network.
    wait_until(lambda: cast(Fetcher, fetching.service.fetcher)._waiting == 0)


@pytest.fixture(scope="module")
def fetching(trained: Path, certificate: Path) -> Iterator[Serving]:
    """A server that fetches, and trusts the certificate of the tests."""
    with serving(trained) as found:
        found.service.fetcher = fetcher(certificate)
        yield found
        assert found.service.fetcher._budget.taken == found.service.fetcher._waiting == 0


def fetcher(certificate: Path, request_bytes: int = 64_000_000) -> Fetcher:
    found = Fetcher(request_bytes, 256_000_000)
    found._tls = ssl.create_default_context(cafile=str(certificate))
    return found


def ask(served: Serving, *urls: str) -> Reply:
    return served.post("/embed", {"items": [{"text": "a cat"}, *({"image": url} for url in urls)]})


def embedding(served: Serving, image: str) -> list[float]:
    answer = ask(served, image)
    assert answer.status == 200, answer.body
    return answer.json["embeddings"][1]


def test_an_image_by_its_address_has_the_vector_of_its_bytes(
    fetching: Serving, network: Network, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    expected = embedding(fetching, base64.b64encode(jpeg(5)).decode())
    assert embedding(fetching, f"https://{NAME}/image/5") == expected
    assert embedding(fetching, f"HTTPS://{NAME}:443/image/5#part") == expected
    path, headers = pictures.asked[0]
    assert (path, headers["host"]) == ("/image/5", NAME)
    assert set(headers) == {"host", "user-agent", "accept", "accept-encoding", "connection"}
    assert network.connected == [PUBLIC, PUBLIC]


def test_other_dialects_take_addresses_too(fetching: Serving, network: Network) -> None:
    asked = {"input": [{"image": f"https://{NAME}/image/5"}]}
    answer = fetching.post("/v1/embeddings", asked)
    assert answer.json["data"][0]["embedding"] == embedding(fetching, f"https://{NAME}/image/5")


def test_an_address_is_fetched_each_time(fetching: Serving, network: Network) -> None:
    assert embedding(fetching, f"https://{NAME}/next/") != embedding(
        fetching, f"https://{NAME}/next/"
    )


def test_nothing_is_fetched_or_looked_up_where_that_was_not_allowed(
    served: Serving, network: Network
) -> None:
    answer = ask(served, f"https://{NAME}/image/5")
    assert answer.status == 400
    assert answer.json["error"]["position"] == 1
    assert "--allow-urls" in answer.json["error"]["message"]
    assert network.resolved == []


NOT_PUBLIC = [
    *(
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "127.8.8.8",
        "169.254.169.254",
    ),
    *(
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
    ),
    *("198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
    *(
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::127.0.0.1",
        "::8.8.8.8",
        "64:ff9b::7f00:1",
    ),
    *(
        "64:ff9b::808:808",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:2::1",
        "2001:20::1",
        "2001:db8::1",
    ),
    *(
        "2002:7f00:1::1",
        "2002:808:808::1",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
    ),
    *("fe80::1%eth0", "fec0::1", "ff02::1", "pictures.test", ""),
]


def test_only_hosts_of_the_internet_are_public() -> None:
    assert [address for address in NOT_PUBLIC if is_public(address)] == []
    public = [
        "8.8.8.8",
        PUBLIC,
        "100.63.255.255",
        "100.128.0.1",
        "172.32.0.1",
        "2606:4700::1111",
        "2a00:1450::1",
    ]
    assert all(is_public(address) for address in public)


HOSTS = [
    *(
        "127.0.0.1",
        "169.254.169.254",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
    ),
    *(
        "[2002:7f00:1::]",
        "[fe80::1%25lo]",
        "2130706433",
        "017700000001",
        "0x7f000001",
        "0177.0.0.1",
        "0x7f.1",
        "127.1",
    ),
    *("localhost", "localhost.", "unknown.test", "two.test", "mapped.test", "private.test"),
]


@pytest.mark.parametrize("host", HOSTS)
def test_private_hosts_are_never_connected_to(
    fetching: Serving, network: Network, host: str
) -> None:
    network.names |= {
        "two.test": [PUBLIC, "10.0.0.7"],
        "mapped.test": ["::ffff:10.0.0.7"],
        "private.test": ["10.0.0.7"],
    }
    answer = ask(fetching, f"https://{host}/latest/meta-data")
    assert (answer.status, answer.json["error"]["position"]) == (400, 1)
    assert network.connected == []
    redirected = ask(
        fetching, f"https://{NAME}/image/1", f"https://{NAME}/to/https://{host}/latest"
    )
    assert (redirected.status, redirected.json["error"]["position"]) == (400, 2)
    assert redirected.json["error"]["message"][6:] == answer.json["error"]["message"][6:].replace(
        "1:", "2:", 1
    )
    assert set(network.connected) == {PUBLIC}


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.test/image/1",
        "https://pictures.test:8443/image/1",
        "https://pictures.test:99999/image/1",
        "https://user:word@pictures.test/image/1",
        "https://pictures.test@127.0.0.1/image/1",
        "https:///image/1",
        "https:image/1",
        "https://[::1/image/1",
        "https://pictures.test/image/1\r\nCookie: a",
        "https://pictures.test/ä",
        "https://pictures.test/" + "a" * 3000,
    ],
)
def test_only_plain_https_addresses_are_fetched(
    fetching: Serving, network: Network, url: str
) -> None:
    assert ask(fetching, url).status == 400
    assert network.resolved == []
    if "//" in url and "///" not in url:  # else it is a path of the server that redirects
        assert ask(fetching, f"https://{NAME}/to/{url}").status == 400
        assert network.resolved in ([], [NAME])


def test_a_name_is_looked_up_once_and_its_checked_address_is_used(
    fetching: Serving, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changing(dict[str, list[str]]):
        def __getitem__(self, name: str) -> list[str]:
            return [PUBLIC] if len(network.resolved) == 1 else ["127.0.0.1"]

    network.names = Changing(network.names)
    assert ask(fetching, f"https://{NAME}/image/1").status == 200
    assert (network.resolved, network.connected) == ([NAME], [PUBLIC])
    network.resolved.clear()
    assert (
        ask(fetching, f"https://{NAME}/hops/1").status == 400
    )  # a redirect is looked up, and checked, again
    assert network.connected == [PUBLIC, PUBLIC]


def test_lookups_that_do_not_end_hold_nothing_up(
    fetching: Serving, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, resolve = threading.Event(), network.resolve

    def stuck(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host == "stuck.test":
            end.wait(300)
        return resolve(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    monkeypatch.setattr(fetch, "SECONDS", 0.3)
    monkeypatch.setattr(http, "_lookups", threading.BoundedSemaphore(2))
    began = time.monotonic()
    for _ in range(2):
        answer = ask(fetching, "https://stuck.test/image/1")
        assert (answer.status, "seconds" in answer.json["error"]["message"]) == (400, True)
    assert ask(fetching, f"https://{NAME}/image/1").status == 503
    assert time.monotonic() - began < 60
    end.set()
    monkeypatch.setattr(fetch, "SECONDS", 10.0)
    while ask(fetching, f"https://{NAME}/image/1").status == 503:
        assert time.monotonic() - began < 100


def test_redirects_end(fetching: Serving, network: Network) -> None:
    assert ask(fetching, f"https://{NAME}/hops/3").status == 200
    assert ask(fetching, f"https://{NAME}/hops/4").status == 400
    assert len(network.connected) == 8


def test_a_certificate_has_to_be_the_names(
    fetching: Serving, network: Network, pictures: Pictures
) -> None:
    answer = ask(fetching, "https://other.test/image/1")
    assert answer.status == 400
    assert "certificate" in answer.json["error"]["message"]
    assert pictures.asked == []


@pytest.mark.parametrize(
    ("path", "status", "named"),
    [
        ("html", 400, "no image"),
        ("gzip", 400, "compressed"),
        ("status/404", 400, "404"),
        ("status/206", 400, "206"),
        ("short", 400, "broke off"),
        ("announced", 413, "MB"),
        ("endless", 413, "MB"),
        ("silent", 400, "seconds"),
        ("slow_head", 400, "seconds"),
        ("slow_body", 400, "seconds"),
    ],
)
def test_what_is_no_image_or_has_no_end_is_refused(
    fetching: Serving,
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    status: int,
    named: str,
) -> None:
    monkeypatch.setattr(fetch, "SECONDS", 0.3 if named == "seconds" else 60.0)
    monkeypatch.setattr(fetch, "LARGEST_IMAGE", 150_000)
    began = time.monotonic()
    answer = ask(fetching, f"https://{NAME}/{path}")
    assert (answer.status, answer.json["error"]["position"]) == (status, 1)
    assert named in answer.json["error"]["message"]
    assert time.monotonic() - began < 40


def test_slow_servers_hold_up_nobody_else(
    fetching: Serving, network: Network, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "SECONDS", 2.0)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, fetching, *[f"https://{NAME}/silent"] * 30)
        while not pictures.asked:
            time.sleep(0.01)
        assert ask(fetching).status == 200
        assert (
            fetching.post(
                "/embed", {"items": [{"image": base64.b64encode(jpeg(7)).decode()}]}
            ).status
            == 200
        )
        assert not slow.done()
        assert slow.result().status == 400
    time.sleep(0.1)
    assert (
        len(pictures.asked) <= 2 * fetch.MAX_CONCURRENT
    )  # those that waited were given up with their request


def test_fetches_at_once_and_those_that_wait_are_bounded(
    fetching: Serving, network: Network, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_WAITING", 20)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, fetching, *[f"https://{NAME}/together"] * 18)
        while not pictures.asked:
            time.sleep(0.01)
        refused = ask(fetching, *[f"https://{NAME}/image/1"] * 3)
        assert (refused.status, refused.headers["Retry-After"]) == (429, "5")
        assert first.result().status == 200
    assert 2 <= pictures.most_at_once <= fetch.MAX_CONCURRENT


def test_the_images_of_one_request_are_bounded_together(
    certificate: Path, network: Network
) -> None:
    size = len(jpeg(1))
    bounded = fetcher(certificate, request_bytes=3 * size)

    async def fetched(count: int) -> int:
        addresses = [ImageAddress(f"https://{NAME}/image/1")] * count
        async with bounded.fetched(addresses, time.monotonic() + 60) as files:
            assert bounded._budget.taken == count * size
            return len(files)

    assert asyncio.run(fetched(3)) == 3
    with pytest.raises(fetch.TooLarge):
        asyncio.run(fetched(4))
    assert bounded._budget.taken == 0


def test_a_model_that_was_named_by_its_fingerprint_answers_or_nobody(
    fetching: Serving, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fetching.service.model
    asked = {"items": [{"image": f"https://{NAME}/next/1"}]}
    demand = {"X-Lapclip-Model": model.fingerprint}
    assert fetching.post("/embed", asked, **demand).status == 200

    def replaced_meanwhile(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if port == 443:
            monkeypatch.setattr(model, "fingerprint", "f" * 16)
        return network.resolve(host, port, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", replaced_meanwhile)
    assert fetching.post("/embed", asked, **demand).status == 409
