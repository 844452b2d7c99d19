"""The exchange between a guest and its host, over real connections: who does not know the key learns nothing, and what
was changed or broken off on the way is noticed."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lapclip import __version__
from lapclip.errors import JoinError, NoAnswer, WrongKey
from lapclip.together import bundle
from lapclip.together import invitation as invitation_module
from lapclip.together.bundle import CHUNK, TextPart, bring_over, digests_of
from lapclip.together.invitation import (
    FETCHING,
    FILES,
    FINISHED,
    FULL,
    LEFT,
    MANIFEST,
    MOST_OF_ONE,
    NONCE,
    PROOF,
    READY,
    RUNNING,
    STATE,
    TIME,
    WAITING,
    Host,
    Invitation,
    _proof,
    own_key,
    shown_key,
    tidy_key,
)

from .relay import Relay, relayed

KEY, OTHER = "ABCDEFGHIJKLMNOP", "ABCDEFGHIJKLMNOQ"
CONTENT = np.random.default_rng(0).bytes(CHUNK + 100_000)
PARTS = [TextPart(b"a short one"), TextPart(CONTENT)]


@pytest.fixture
def invitation() -> Iterator[Invitation]:
    made = Invitation(
        KEY, {"run_id": "12345678", "secret": "photos of mine"}, PARTS, 2, ("127.0.0.1", 0)
    )
    yield made
    made.close()


@pytest.fixture
def there(invitation: Invitation) -> Host:
    return Host("127.0.0.1", invitation.port, KEY)


@pytest.fixture
def relay(invitation: Invitation) -> Iterator[Relay]:
    with relayed(invitation.port) as made:
        yield made


def ask(
    port: int,
    path: str = MANIFEST,
    *,
    nonce: str = "n",
    when: float | None = None,
    signed: str = "",
    byte_range: str = "",
) -> tuple[int, bytes]:
    """A request by hand, signed for a path and without a range unless it is said."""
    moment = f"{time.time() if when is None else when:.3f}"
    proof = _proof(KEY, "ask", "GET", signed or path, "", nonce, moment, b"")
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {
        NONCE: nonce,
        TIME: moment,
        PROOF: proof,
        **({"Range": byte_range} if byte_range else {}),
    }
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_guest_that_knows_the_key_hears_what_there_is(there: Host) -> None:
    assert there.manifest()["secret"] == "photos of mine"
    assert b"".join(there.read(1, 10, 5000)) == CONTENT[10:5000]


def test_a_wrong_key_is_refused_and_counted(invitation: Invitation, there: Host) -> None:
    stranger = Host("127.0.0.1", invitation.port, OTHER)
    for _ in range(2):
        with pytest.raises(WrongKey):
            stranger.manifest()
    with pytest.raises(WrongKey):
        list(stranger.read(0, 0, 5))
    with pytest.raises(WrongKey):
        stranger.tell(READY)
    assert invitation.wrong_keys == {"127.0.0.1": 4}
    assert invitation.guests == []
    assert there.manifest()


def test_the_key_never_travels(relay: Relay) -> None:
    there = Host("127.0.0.1", relay.port, KEY)
    there.manifest()
    there.tell(READY)
    assert b"photos of mine" in relay.heard  # it is not encrypted, and the docs say so
    for form in (KEY, shown_key(KEY), KEY.lower()):
        assert form.encode() not in relay.heard


def test_a_request_that_was_overheard_is_no_use(invitation: Invitation) -> None:
    moment = time.time()
    assert ask(invitation.port, nonce="once", when=moment)[0] == 200
    status, body = ask(invitation.port, nonce="once", when=moment)
    assert status == 409
    assert b"photos" not in body


@pytest.mark.parametrize(
    "changed",
    [
        {"signed": STATE},
        {"byte_range": "bytes=0-4", "path": f"{FILES}0"},
        {"path": f"{FILES}0", "signed": MANIFEST},
    ],
)
def test_a_proof_is_good_for_one_request_alone(
    invitation: Invitation, changed: dict[str, Any]
) -> None:
    assert ask(invitation.port, **changed)[0] == 403


def test_a_request_of_another_hour_is_refused(invitation: Invitation) -> None:
    assert ask(invitation.port, when=time.time() - 3600)[0] == 401


def test_a_guest_whose_clock_is_wrong_takes_the_time_of_the_host(there: Host) -> None:
    there._ahead = 4000.0
    assert there.manifest()["run_id"] == "12345678"


@pytest.mark.parametrize(
    ("path", "byte_range"),
    [
        ("/files/9", "bytes=0-4"),
        ("/files/0", "bytes=5-99"),
        ("/files/x", "bytes=0-1"),
        ("/etc", ""),
    ],
)
def test_what_is_not_offered_cannot_be_read(
    invitation: Invitation, path: str, byte_range: str
) -> None:
    moment, nonce = f"{time.time():.3f}", os.urandom(4).hex()
    proof = _proof(KEY, "ask", "GET", path, byte_range, nonce, moment, b"")
    connection = HTTPConnection("127.0.0.1", invitation.port, timeout=60)
    connection.request(
        "GET", path, headers={NONCE: nonce, TIME: moment, PROOF: proof, "Range": byte_range}
    )
    assert connection.getresponse().status in (400, 404, 416)


def test_an_answer_that_was_changed_is_noticed(relay: Relay) -> None:
    relay.change = lambda piece: piece.replace(b"photos of mine", b"photos of ours")
    with pytest.raises(JoinError, match="does not know the key"):
        Host("127.0.0.1", relay.port, KEY).manifest()


def test_another_version_is_named_also_where_the_key_is_wrong(relay: Relay) -> None:
    relay.change = lambda piece: piece.replace(
        f"Version: {__version__}".encode(), b"Version: 0.0.1"
    )
    with pytest.raises(
        JoinError, match=r"has lapclip 0\.0\.1, and here it is " + __version__.replace(".", r"\.")
    ):
        Host("127.0.0.1", relay.port, OTHER).manifest()


def test_a_request_without_end_and_too_many_connections_are_refused(invitation: Invitation) -> None:
    connection = HTTPConnection("127.0.0.1", invitation.port, timeout=60)
    connection.request("POST", STATE, headers={"Content-Length": "5000000"})
    assert connection.getresponse().status == 413
    idle = [socket.create_connection(("127.0.0.1", invitation.port)) for _ in range(MOST_OF_ONE)]
    try:
        with pytest.raises(NoAnswer):
            [
                Host("127.0.0.1", invitation.port, KEY).manifest() for _ in range(100)
            ]  # until all idle ones are accepted
    finally:
        for one in idle:
            one.close()


def test_the_host_knows_who_is_there_and_guests_hear_how_it_stands(
    invitation: Invitation, there: Host
) -> None:
    assert there.tell(FETCHING, 5, 10)["state"] == WAITING
    assert [(guest.done, guest.total) for guest in invitation.guests] == [(5, 10)]
    assert not invitation.is_complete
    there.tell(READY, 10, 10)
    assert invitation.is_complete
    assert Host("127.0.0.1", invitation.port, KEY).tell(FETCHING)["state"] == FULL
    invitation.tell(RUNNING)
    invitation.round = 3
    assert there.tell(READY)["round"] == 3
    invitation.tell(FINISHED, "it went well")
    assert there.tell(LEFT) == {
        "state": FINISHED,
        "message": "it went well",
        "run_id": "12345678",
        "round": 3,
    }
    assert invitation.guests == []


def test_a_guest_that_was_killed_has_its_place_back(
    invitation: Invitation, there: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.tell(FETCHING, 5, 10)
    again = Host("127.0.0.1", invitation.port, KEY)
    assert again.tell(FETCHING)["state"] == FULL  # two of one computer are two
    monkeypatch.setattr(invitation_module, "REPLACED", 0.2)
    time.sleep(0.3)
    assert again.tell(FETCHING)["state"] == WAITING
    assert [guest.id for guest in invitation.guests] == [again.own.id]


def test_a_transfer_that_breaks_off_goes_on_to_the_same_bytes(tmp_path: Path, relay: Relay) -> None:
    there, asked = Host("127.0.0.1", relay.port, KEY), []
    left = [3_000_000]

    def break_off(piece: bytes) -> bytes | None:
        left[0] -= len(piece)
        return piece if left[0] > 0 else None

    def read(number: int, first: int, last: int) -> Iterator[bytes]:
        for piece in there.read(number, first, last):
            asked.append(len(piece))
            yield piece

    relay.change = break_off
    folder, files, breaks = tmp_path / "cache" / "data", digests_of(PARTS), 0
    while not folder.exists():
        left[0] = 3_000_000 + breaks  # at another byte each time
        try:
            bring_over(folder, files, read)
        except NoAnswer:
            breaks += 1
        assert breaks < 10
    assert breaks > 1
    assert (folder / "1.pixels").read_bytes() == CONTENT
    assert sum(asked) == sum(part.size for part in PARTS)  # nothing came twice
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["data"]


def test_what_was_damaged_between_two_tries_comes_again(tmp_path: Path, there: Host) -> None:
    folder = tmp_path / "data"
    incoming = tmp_path / "data.incoming"
    incoming.mkdir()
    (incoming / "1.pixels").write_bytes(b"x" + CONTENT[1:5000])
    bring_over(folder, digests_of(PARTS), there.read)
    assert (folder / "1.pixels").read_bytes() == CONTENT


def test_data_that_was_changed_on_the_way_is_never_there(tmp_path: Path, relay: Relay) -> None:
    middle = CONTENT[3000:3016]
    relay.change = lambda piece: piece.replace(middle, bytes(16))
    with pytest.raises(JoinError, match="digest"):
        bring_over(tmp_path / "data", digests_of(PARTS), Host("127.0.0.1", relay.port, KEY).read)
    assert not (tmp_path / "data").exists()


def test_a_disk_without_room_is_named_before_anything_comes(
    tmp_path: Path, there: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "room_left", lambda folder: 1_000_000)
    with pytest.raises(JoinError, match="disk"):
        bring_over(tmp_path / "data", digests_of(PARTS), there.read)
    assert not list(tmp_path.glob("data.incoming/*"))


def test_a_key_is_kept_and_nobody_else_can_read_it(empty_cache: Path) -> None:
    key = own_key()
    assert own_key() == key == tidy_key(shown_key(key).lower().replace(" ", "-"))
    path = empty_cache / "join-key"
    if os.name != "nt":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.dumps(key)[1:-1].isalnum()
    path.write_text("nonsense")
    assert own_key() != key


@pytest.mark.parametrize("typed", ["", "ABCD", KEY + "A", KEY[:-1] + "1"])
def test_what_is_no_key_is_said_so(typed: str) -> None:
    with pytest.raises(JoinError, match="no key"):
        tidy_key(typed)
