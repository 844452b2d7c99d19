"""How a guest gets from the host what it needs, and how the host knows who is there: a small HTTP server, and its
client.

A key that both ends know guards it, and never travels. Each request proves that its sender knows the key, by an HMAC
over the request, a nonce that is used once, and the time; each answer in JSON proves the same over the nonce and the
answer. The digests of the data are in such an answer, so its bytes need no more. Nothing is encrypted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import platform
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from lapclip import __version__
from lapclip.errors import JoinError, NoAnswer, WrongKey, first_line
from lapclip.paths import cache_folder, make_private, parse_json, read_bytes, write_atomic
from lapclip.text import one_line
from lapclip.together.bundle import CHUNK, Part

MANIFEST, STATE, FILES = "/manifest", "/state", "/files/"
NONCE, TIME, PROOF, VERSION = (
    "X-Lapclip-Nonce",
    "X-Lapclip-Time",
    "X-Lapclip-Proof",
    "X-Lapclip-Version",
)
KEY_LETTERS = 16
"""Letters of a key, of five bits each: too many to be guessed, also by who has listened."""
WINDOW = 60.0
"""Seconds by which the time of a request may differ from that of the host. Nonces are remembered for that long."""
MOST_CONNECTIONS, MOST_OF_ONE = 32, 8
"""Connections at once: of all, and of one address."""
SECONDS = 15.0
"""How long either end waits for the next bytes of the other."""
ASKING = 10.0
"""Seconds that a whole request may take to come."""
LARGEST_REQUEST, LARGEST_ANSWER = 4_096, 64_000_000
"""Bytes of JSON."""
PIECE = 256 * 1024
"""Bytes of the data that are sent and received at once."""
SLOWEST = 5.0
"""Seconds that a request with a wrong key waits for its refusal, once there were some."""
SILENT, REPLACED = 30.0, 12.0
"""Seconds after which a guest that has said nothing counts as gone, and after which another one of the same computer
takes its place: it was killed, and the user has typed the line again."""
WAITING, RUNNING, FULL = "waiting", "running", "full"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""How the host stands: it waits for guests, trains, has as many as it asked for, or is done in one of three ways."""
ENDED = (FINISHED, STOPPED, FAILED)
FETCHING, READY, TRAINING, LEFT = "fetching", "ready", "training", "left"
"""How a guest stands."""


def key_path() -> Path:
    """Where a host's key is, so that a guest can come back without it being typed again."""
    return cache_folder() / "join-key"


def own_key() -> str:
    """The key of this computer as a host: the one it had before, or a new one."""
    path = key_path()
    with suppress(OSError, JoinError, UnicodeDecodeError):
        return tidy_key(read_bytes(path, LARGEST_REQUEST, own=True).decode())
    key = base64.b32encode(secrets.token_bytes(KEY_LETTERS * 5 // 8)).decode()
    make_private(path.parent)

    def write_private(partial: Path) -> None:
        with open(
            os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii"
        ) as file:
            file.write(shown_key(key))

    write_atomic(path, write_private)
    return key


def shown_key(key: str) -> str:
    """A key in groups of four, as people read it."""
    return " ".join(key[at : at + 4] for at in range(0, len(key), 4))


def tidy_key(typed: str) -> str:
    """A key from how it was typed: with spaces or dashes, in small or large letters."""
    key = re.sub(r"[\s-]", "", typed).upper()
    if not re.fullmatch(rf"[A-Z2-7]{{{KEY_LETTERS}}}", key):
        raise JoinError(
            f"That is no key: one has {KEY_LETTERS} letters and digits.",
            hint="the key that the host shows, as it is",
        )
    return key


def _proof(key: str, *parts: str | bytes) -> str:
    """An HMAC over some parts, each with its length, so that no two lists of parts look alike."""
    mac = hmac.new(
        hashlib.sha256(f"lapclip join 1 {key}".encode()).digest(), digestmod=hashlib.sha256
    )
    for part in parts:
        content = part if isinstance(part, bytes) else part.encode("utf-8", "replace")
        mac.update(len(content).to_bytes(8, "big") + content)
    return mac.hexdigest()


@dataclass(frozen=True)
class Guest:
    """A computer that has joined, as the host knows it."""

    id: str
    name: str
    address: str
    state: str = FETCHING
    done: int = 0
    total: int = 0
    heard: float = field(default_factory=time.monotonic, compare=False)

    @property
    def is_here(self) -> bool:
        return self.state != LEFT and self.silent_for < SILENT

    @property
    def silent_for(self) -> float:
        """Seconds since it last said something."""
        return time.monotonic() - self.heard

    def is_replaced_by(self, other: Guest) -> bool:
        """Whether another guest is the same computer, on which this one was killed."""
        return (self.name, self.address) == (
            other.name,
            other.address,
        ) and self.silent_for > REPLACED


class Invitation:
    """What a host offers, and who has taken it up. `address` is the only one that is listened on."""

    def __init__(
        self,
        key: str,
        manifest: dict[str, Any],
        parts: Sequence[Part],
        machines: int,
        address: tuple[str, int],
    ) -> None:
        self.key, self.parts, self.machines = key, parts, machines
        self._manifest = manifest
        self._state, self._message = WAITING, ""
        self.round = 0
        """How often the agents have met."""
        self._guests: dict[str, Guest] = {}
        self._nonces: dict[str, float] = {}
        self._wrong: dict[str, int] = {}
        self._lock = threading.Lock()
        self._connections: dict[str, int] = {}
        self.turned_away = -SILENT
        """When someone last asked for whom there was no place."""
        try:
            self._server = _Server(address, self)
        except OSError as error:
            raise JoinError(
                f"{address[0]} cannot be listened on at port {address[1]}: {error.strerror or error}.",
                hint="--address with another address or port, such as --address 192.168.1.20:29500",
            ) from None
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(0.1,), name="lapclip-invitation", daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def guests(self) -> list[Guest]:
        """Those who are here."""
        with self._lock:
            return [guest for guest in self._guests.values() if guest.is_here]

    @property
    def is_complete(self) -> bool:
        """Whether all guests have everything."""
        return sum(guest.state in (READY, TRAINING) for guest in self.guests) >= self.machines - 1

    @property
    def wrong_keys(self) -> dict[str, int]:
        """How many requests with a wrong key came from each address."""
        with self._lock:
            return dict(self._wrong)

    def tell(self, state: str, message: str = "") -> None:
        """From now on guests hear this when they ask."""
        with self._lock:
            self._state, self._message = state, message

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def connected(self, address: str) -> bool:
        """Count a connection; False where there are too many already."""
        with self._lock:
            here = self._connections.get(address, 0)
            if here >= MOST_OF_ONE or sum(self._connections.values()) >= MOST_CONNECTIONS:
                return False
            self._connections[address] = here + 1
            return True

    def disconnected(self, address: str) -> None:
        with self._lock:
            left = self._connections.pop(address, 0) - 1
            if left > 0:
                self._connections[address] = left

    def slow_down(self, address: str) -> None:
        """Count a wrong key, and wait longer after each."""
        with self._lock:
            if len(self._wrong) > 1000:
                self._wrong.clear()
            self._wrong[address] = count = self._wrong.get(address, 0) + 1
        time.sleep(min(SLOWEST, 0.05 * 2 ** min(count, 10)))

    def is_new(self, nonce: str) -> bool:
        """Whether a nonce was not used before. Those that are too old to pass are forgotten."""
        now = time.time()
        with self._lock:
            self._nonces = {
                known: used for known, used in self._nonces.items() if now - used < 2 * WINDOW + 1
            }
            if nonce in self._nonces:
                return False
            self._nonces[nonce] = now
            return True

    def manifest(self) -> dict[str, Any]:
        return {**self._manifest, "time": time.time()}

    def hear(self, address: str, told: Any) -> dict[str, Any]:
        """Take what a guest says of itself, and say how the host stands."""
        match told:
            case {
                "id": str(id),
                "name": str(name),
                "state": str(state),
                "done": int(done),
                "total": int(total),
            }:
                pass
            case _:
                raise ValueError("a guest says who it is and how far it is")
        guest = Guest(id[:64], one_line(name)[:64], address, state[:16], done, total)
        with self._lock:
            others = [other for other in self._guests.values() if other.id != guest.id]
            here = [other for other in others if other.is_here and not other.is_replaced_by(guest)]
            if len(here) >= self.machines - 1 and state != LEFT and self._state not in ENDED:
                self.turned_away = time.monotonic()
                taken = f"the host was told --machines {self.machines}, and has them; that of a guest that was killed"
                return {"state": FULL, "message": f"{taken} is free within half a minute"}
            self._guests = {other.id: other for other in here} | {guest.id: guest}
            about = {"run_id": self._manifest.get("run_id"), "round": self.round}
            return {"state": self._state, "message": self._message, **about}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], invitation: Invitation) -> None:
        self.invitation = invitation
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer would look up the name of the address, which takes long where nobody knows it.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.invitation.connected(client_address[0]):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.invitation.disconnected(client_address[0])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A guest that breaks off is no fault here."""


class _Refusal(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One request, which is the only one of its connection."""

    timeout = SECONDS
    server_version, sys_version = "lapclip", ""

    @property
    def invitation(self) -> Invitation:
        return cast(_Server, self.server).invitation

    def setup(self) -> None:
        """Whoever sends a request byte by byte is cut off: others want the connection."""
        super().setup()
        self._asking = threading.Timer(ASKING, lambda: self.connection.shutdown(socket.SHUT_RDWR))
        self._asking.daemon = True
        self._asking.start()

    def finish(self) -> None:
        self._asking.cancel()
        with suppress(OSError):  # of a connection that was cut off
            super().finish()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """What happens is shown by whoever asks the invitation."""

    def _answer(self) -> None:
        try:
            body, nonce = self._checked()
            if self.command == "GET" and self.path.startswith(FILES):
                self._send_file()
            elif (self.command, self.path) == ("GET", MANIFEST):
                self._send_json(self.invitation.manifest(), nonce)
            elif (self.command, self.path) == ("POST", STATE):
                self._send_json(
                    self.invitation.hear(self.client_address[0], parse_json(body.decode())), nonce
                )
            else:
                raise _Refusal(404, "there is nothing here")
        except _Refusal as refusal:
            self._refuse(refusal.status, str(refusal))
        except (ValueError, LookupError) as error:
            self._refuse(400, first_line(error))

    def _checked(self) -> tuple[bytes, str]:
        """The body and the nonce of a request whose sender knows the key."""
        told = [self.headers.get(name, "") for name in (NONCE, TIME, PROOF)]
        nonce, when, proof = told
        length = self.headers.get("Content-Length", "0")
        if not re.fullmatch(r"[0-9]{1,5}", length) or int(length) > LARGEST_REQUEST:
            raise _Refusal(413, "the request is too long")
        body = self.rfile.read(int(length))
        self._asking.cancel()
        asked = ("ask", self.command, self.path, self.headers.get("Range", ""), nonce, when, body)
        wanted = _proof(self.invitation.key, *asked)
        if not hmac.compare_digest(wanted.encode(), proof.encode("utf-8", "replace")):
            self.invitation.slow_down(self.client_address[0])
            raise _Refusal(403, "the key is another one")
        if (
            not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", when)
            or abs(time.time() - float(when)) > WINDOW
        ):
            raise _Refusal(401, "the time is another one")
        if not self.invitation.is_new(nonce):
            raise _Refusal(409, "the request was made before")
        return body, nonce

    def _send_file(self) -> None:
        number = self.path.removeprefix(FILES)
        if not re.fullmatch(r"[0-9]{1,6}", number):
            raise _Refusal(404, "there is nothing here")
        part = self.invitation.parts[int(number)]
        asked = re.fullmatch(r"bytes=([0-9]{1,18})-([0-9]{1,18})", self.headers.get("Range", ""))
        if not asked:
            raise _Refusal(416, "a file is read by ranges")
        first, last = int(asked[1]), int(asked[2]) + 1
        if not first < last <= part.size or last - first > CHUNK:
            raise _Refusal(416, "there are no such bytes")
        content = part.read(first, last)
        self._begin(206, len(content), "application/octet-stream")
        for at in range(0, len(content), PIECE):
            self.wfile.write(content[at : at + PIECE])

    def _send_json(self, answer: dict[str, Any], nonce: str) -> None:
        body = json.dumps(answer).encode()
        self._begin(
            200,
            len(body),
            "application/json",
            proof=_proof(self.invitation.key, "answer", nonce, body),
        )
        self.wfile.write(body)

    def _refuse(self, status: int, reason: str) -> None:
        with suppress(OSError):
            self._begin(status, len(reason.encode()), "text/plain")
            self.wfile.write(reason.encode())

    def _begin(self, status: int, length: int, kind: str, proof: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.send_header(VERSION, __version__)
        self.send_header(TIME, f"{time.time():.3f}")
        if proof:
            self.send_header(PROOF, proof)
        self.end_headers()


class Host:
    """The host, as a guest reaches it."""

    def __init__(self, address: str, port: int, key: str) -> None:
        self.address, self.port, self.key = address, port, key
        self.own = Guest(secrets.token_hex(8), platform.node() or "a guest", "")
        self._seconds = SECONDS
        self._ahead = 0.0
        """Seconds by which the host's clock is ahead of this one."""

    def manifest(self) -> dict[str, Any]:
        """What there is to train. Raises NoAnswer, WrongKey or JoinError."""
        return self._json("GET", MANIFEST)

    def tell(self, state: str, done: int = 0, total: int = 0) -> dict[str, Any]:
        """Say how far this guest is, and hear how the host stands. Who leaves does not wait for long."""
        self.own = replace(self.own, state=state, done=done, total=total)
        self._seconds = 2.0 if state == LEFT else SECONDS
        told = {
            name: value
            for name, value in asdict(self.own).items()
            if name not in ("address", "heard")
        }
        return self._json("POST", STATE, json.dumps(told).encode())

    def read(self, number: int, first: int, last: int) -> Iterator[bytes]:
        """The bytes of a file, in pieces. What breaks off raises NoAnswer after the pieces that came."""
        answer, connection, _ = self._send(
            "GET", f"{FILES}{number}", byte_range=f"bytes={first}-{last - 1}"
        )
        with connection:
            while first < last:
                try:
                    piece = answer.read1(min(PIECE, last - first))
                except (OSError, HTTPException) as error:
                    raise self._silent(error) from None
                if not piece:
                    raise self._silent(ConnectionError("it broke off"))
                yield piece
                first += len(piece)

    def _json(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        answer, connection, nonce = self._send(method, path, body)
        with connection:
            try:
                content = answer.read(LARGEST_ANSWER + 1)
            except (OSError, HTTPException) as error:
                raise self._silent(error) from None
        proof = answer.headers.get(PROOF, "")
        wanted = _proof(self.key, "answer", nonce, content)
        if len(content) > LARGEST_ANSWER or not hmac.compare_digest(
            wanted.encode(), proof.encode()
        ):
            raise JoinError(
                f"What answers at {self._where} does not know the key.",
                hint="the line that the host shows",
            )
        try:
            found = parse_json(content.decode())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise JoinError(f"{self._where} answers something else than a lapclip of this version.")
        return found

    def _send(
        self, method: str, path: str, body: bytes = b"", byte_range: str = "", *, again: bool = True
    ) -> tuple[HTTPResponse, Any, str]:
        nonce, when = secrets.token_hex(16), f"{time.time() + self._ahead:.3f}"
        proof = _proof(self.key, "ask", method, path, byte_range, nonce, when, body)
        headers = {NONCE: nonce, TIME: when, PROOF: proof, "Content-Length": str(len(body))}
        connection = HTTPConnection(self.address, self.port, timeout=self._seconds)
        try:
            connection.request(
                method, path, body, headers | ({"Range": byte_range} if byte_range else {})
            )
            answer = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            raise self._silent(error) from None
        if answer.status in (200, 206):
            return answer, closing(connection), nonce
        try:
            reason, told = (
                one_line(answer.read(200).decode("utf-8", "replace")),
                answer.headers.get(TIME, ""),
            )
        except (OSError, HTTPException) as error:
            raise self._silent(error) from None
        finally:
            connection.close()
        if answer.status == 401 and again and re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", told):
            self._ahead = float(told) - time.time()
            return self._send(method, path, body, byte_range, again=False)
        theirs = one_line(answer.headers.get(VERSION, ""))[:32]
        if theirs and theirs != __version__:
            raise JoinError(
                f"{self._where} has lapclip {theirs}, and here it is {__version__}.",
                hint="the same version on both",
            )
        if answer.status == 403:
            raise WrongKey(f"{self._where} has another key.", hint="the key that the host shows")
        raise JoinError(f"{self._where} refuses: {reason or answer.status}.")

    @property
    def _where(self) -> str:
        return f"{self.address}:{self.port}"

    def _silent(self, error: Exception) -> NoAnswer:
        why = getattr(error, "strerror", None) or first_line(error)
        return NoAnswer(
            f"{self._where} does not answer: {why}.",
            hint="the line that the host shows, once it shows its key (a run that is over has none); a firewall there",
        )
