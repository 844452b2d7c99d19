"""`lapclip train --machines` and `lapclip join`: one computer trains and invites others, which take the data from it.

A guest trusts a host with its processor, and with nothing else: it opens no path that the host names, calls no code
that was not used here before, and compares what it is given to train with what it was told when it joined.
"""

from __future__ import annotations

import importlib.metadata
import platform
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from lapclip import __version__
from lapclip.commands.choose_recipe import read_request
from lapclip.commands.resume import move_data
from lapclip.config import SECTIONS, Config, Layer, build_config
from lapclip.data.dataset import DataSet
from lapclip.data.pixels import View
from lapclip.data.sources import absolute, find_source
from lapclip.errors import ConfigError, JoinError, LapclipError, NoAnswer, RunError
from lapclip.machine.choose_device import candidates
from lapclip.machine.desktop import kept_awake
from lapclip.model.shapes import SHAPES
from lapclip.paths import cache_folder, digest_of_bytes
from lapclip.progress import DataProgress
from lapclip.runs.events import mapping
from lapclip.runs.folder import TrainRequest, check_name, find_run
from lapclip.runs.messages import recall_text
from lapclip.suggest import command
from lapclip.text import counted, one_line, size
from lapclip.together import ADDRESS, PORT, Agreement, resume_together
from lapclip.together.bundle import (
    FINGERPRINT,
    FileDigests,
    Report,
    bring_over,
    bundle_folder,
    digests_of,
    parts_of,
)
from lapclip.together.engine import Ended, Meeting, address_of, listen, own_address, train_together
from lapclip.together.invitation import (
    ENDED,
    FAILED,
    FETCHING,
    FINISHED,
    FULL,
    LEFT,
    READY,
    RUNNING,
    STOPPED,
    TRAINING,
    WAITING,
    Guest,
    Host,
    Invitation,
    own_key,
    shown_key,
)
from lapclip.training.preparation import gather, gather_again
from lapclip.training.resolvers import Context

T = TypeVar("T")

ASK_EVERY, RETRY_EVERY, SAY_EVERY, BEAT_EVERY = 1.0, 3.0, 60.0, 5.0
"""Seconds: between two looks at the other side, between two tries to reach it, between two words about that, and
between two signs of life of a guest that trains."""
FAREWELL = 15.0
"""Seconds for which a host still answers guests after the end."""
CLOCKS = 8.0
"""Seconds by which clocks may differ: torch's agents take each other for dead beyond fifteen."""
DRAWN, BUNDLED, STREAMED = "drawn", "bundled", "streamed"
"""How a guest comes by the data."""


class HostDisplay(Protocol):
    """What a host shows."""

    def invite(self, lines: Sequence[str]) -> None: ...

    def show_guests(self, guests: Sequence[Guest], wanted: int) -> None: ...

    def say(self, line: str) -> None: ...

    def preparing(self, done: int, total: int, /) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Offer:
    """What a host trains, as far as it is known before the run begins."""

    config: Config
    data: DataSet
    compares: bool = False
    """Whether nothing is trained, and the computers only find out how fast they are together."""
    address: str | None = None
    """What the run was joined at before, where that was asked for."""


def offer_comparison(machines: int, data: DataProgress) -> Offer:
    """A comparison, with the settings and the data of the first run: nothing has to be brought over."""
    return replace(offer_new(TrainRequest("first-run"), None, machines, data), compares=True)


def offer_new(asked: TrainRequest, name: str | None, machines: int, data: DataProgress) -> Offer:
    """A new run. What cannot be trained is refused here, before anyone is invited."""
    check_name(name)
    request = read_request(asked)
    candidates(request.config.train)
    made = gather(Context(request), data)
    return Offer(made.config, made.data)


def offer_again(name: str | None, progress: DataProgress, moved_data: str | None = None) -> Offer:
    """Offer a run that goes on. `moved_data` is where its data lies now, if it was moved."""
    run = find_run(name)
    saved = run.read_settings()
    if moved_data is not None:
        move_data(saved, moved_data)
    if run.state in ("running", "finished"):
        raise RunError(
            f"{run.path} is {run.state}; there is nothing to resume.", hint="lapclip runs"
        )
    made = gather_again(run, saved, progress)
    return Offer(
        made.config,
        made.data,
        address=str(mapping(saved.get("together")).get("address") or "") or None,
    )


def host(
    offer: Offer,
    machines: int,
    address: str | None,
    arguments: Sequence[str],
    name: str | None,
    shown: HostDisplay,
) -> int:
    """Invite guests, and train with them when all are there. `arguments` are those of the command that trains."""
    address = address or offer.address
    own, port = _place(address)
    parts = parts_of(offer.data) if _kind(offer) == BUNDLED else []
    run_id = secrets.token_hex(8)
    with listen(own, port + 1) as listening:
        manifest = _manifest(offer, machines, run_id, port + 1, digests_of(parts, shown.preparing))
        invitation = Invitation(own_key(), manifest, parts, machines, (own, port))
        try:
            shown.invite(_invitation_lines(offer, invitation, own, machines))
            _await_guests(invitation, shown)
            invitation.tell(RUNNING)
            meeting = Meeting(run_id, own, port + 1, machines, own, invitation.key, listening)
            told = {ADDRESS: address} if address else {}
            ended = train_together(
                meeting, arguments, told, lambda number: setattr(invitation, "round", number)
            )
            invitation.tell(*_how_it_went(ended, name, offer))
            if (
                ended.status == 128 + signal.SIGTERM and not offer.compares
            ):  # of Ctrl-C the process itself says it
                shown.say(
                    f"Ended by SIGTERM; what there is goes on with {resume_together(name, machines)}."
                )
        except KeyboardInterrupt:
            invitation.tell(STOPPED, "the host was interrupted")
            began = f"Interrupted; what there is goes on with {resume_together(name, machines)}."
            before = "Interrupted before the run began; there is nothing to resume."
            raise KeyboardInterrupt(began if invitation.is_complete else before) from None
        except LapclipError as error:
            invitation.tell(FAILED, error.message)
            raise
        finally:
            shown.close()
            _part(invitation)
            invitation.close()
    if ended.status is None:
        raise JoinError(f"The run cannot go on: {ended.why}.", hint=resume_together(name, machines))
    return ended.status


def _place(address: str | None) -> tuple[str, int]:
    """The address and the port that a host listens on; never all addresses."""
    name, _, number = (address or "").partition(":")
    if number and not (number.isascii() and number.isdigit() and 0 < int(number) < 65535):
        raise ConfigError(
            f"--address {address}: {number} is no port.", hint="--address 192.168.1.20:29500"
        )
    if name in ("0.0.0.0", "*"):
        raise ConfigError(
            "--address names one address of this computer, not all of them.", hint="--address eth0"
        )
    return address_of(name) if name else own_address(), int(number) if number else PORT


def _kind(offer: Offer) -> str:
    if find_source(offer.config.data.source).is_drawn:
        return DRAWN
    return STREAMED if offer.data.train.sequential else BUNDLED


def _manifest(
    offer: Offer, machines: int, run_id: str, port: int, files: Sequence[FileDigests]
) -> dict[str, Any]:
    return {
        "lapclip": __version__,
        "torch": _torch_version(),
        "system": platform.system(),
        "name": platform.node(),
        "run_id": run_id,
        "machines": machines,
        "port": port,
        "settings": asdict(offer.config),
        "data": _kind(offer),
        "fingerprint": offer.data.fingerprint,
        "pairs": len(offer.data.train),
        "files": [asdict(file) for file in files],
        "compares": offer.compares,
    }


def _torch_version() -> str:
    """The release of torch, whatever it was built for: a CUDA build and one for the CPU are the same release."""
    return importlib.metadata.version("torch").partition("+")[0]


def _invitation_lines(offer: Offer, invitation: Invitation, own: str, machines: int) -> list[str]:
    guests = "other computer" if machines == 2 else f"{machines - 1} other computers"
    port = invitation.port
    lines = [
        f"On the {guests}, type:  {command('join', f'{own}:{port}')}",
        f"The key is:  {shown_key(invitation.key)}",
        f"Firewalls: ports {port} and {port + 1} of this computer, and between all of them the ports that the system "
        "picks for torch's engine (gloo), both ways.",
        "What the computers send each other while they train is neither encrypted nor authenticated: use a network "
        "that you trust.",
    ]
    if _kind(offer) == STREAMED:
        lines.append(
            "The images are streamed, so they are not brought over: each computer needs a copy; join --data names it."
        )
    return lines


def _await_guests(invitation: Invitation, shown: HostDisplay) -> None:
    """Wait until all guests have everything."""
    counted_before = 0
    while not invitation.is_complete:
        shown.show_guests(invitation.guests, invitation.machines - 1)
        wrong = invitation.wrong_keys
        if sum(wrong.values()) >= max(1, 2 * counted_before):
            counted_before = sum(wrong.values())
            shown.say(
                f"{counted(counted_before, 'request')} with a wrong key, from {', '.join(sorted(wrong)[:3])}"
            )
        time.sleep(ASK_EVERY / 4)
    shown.show_guests(invitation.guests, invitation.machines - 1)
    shown.close()


def _how_it_went(ended: Ended, name: str | None, offer: Offer) -> tuple[str, str]:
    """The end of a run, as guests are told."""
    if ended.interrupted:
        return (
            STOPPED,
            f"the host was interrupted{'' if offer.compares else '; what it has saved is there'}",
        )
    if ended.status:
        return FAILED, f"the host ended with status {ended.status}"
    if ended.status is None:
        return FAILED, f"the host cannot go on: {ended.why}"
    if offer.compares:
        return FINISHED, "the comparison is finished; the host shows it"
    with suppress(LapclipError, LookupError):
        run = find_run(name)
        if run.read_settings()["run"]["data_fingerprint"] == offer.data.fingerprint:
            ending = run.last_ending()
            if ending.get("type") == "stopped":
                return STOPPED, f"{run.name} was stopped; everything is saved on the host"
            return FINISHED, f"{run.name} is finished: {recall_text(ending['evaluation'])}"
    return FINISHED, "the run is finished"


def _part(invitation: Invitation) -> None:
    """Answer guests until all have heard how it ended, but not for long."""
    until = time.monotonic() + FAREWELL
    while time.monotonic() < until:
        # Those for whom there was no place ask now and then, and are to hear it, too.
        if not invitation.guests and time.monotonic() - invitation.turned_away > 3 * ASK_EVERY:
            return
        time.sleep(0.1)


class GuestDisplay(Protocol):
    """What a guest shows."""

    def say(self, line: str) -> None: ...

    def fetching(self, done: int, total: int, /) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Invited:
    """What a host has told a guest, checked."""

    run_id: str
    name: str
    machines: int
    port: int
    config: Config
    data: str
    fingerprint: str
    pairs: int
    files: Sequence[FileDigests]
    compares: bool = False

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Joined:
    """What `join` reports."""

    host: str
    state: str
    message: str
    seconds: float
    fetched_bytes: int
    status: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "status"}


def split_place(place: str) -> tuple[str, int]:
    """The address and the port of HOST:PORT; without a port, the usual one. Names count for their IPv4 address."""
    name, _, number = (
        place.strip().rpartition(":") if ":" in place else (place.strip(), "", str(PORT))
    )
    if not name or not (number.isascii() and number.isdigit() and 0 < int(number) < 65535):
        raise ConfigError(
            f"{place} is no HOST:PORT.",
            hint="the line that the host shows, such as 192.168.1.20:29400",
        )
    try:
        return socket.gethostbyname(name), int(number)
    except OSError:
        raise JoinError(
            f"Nobody knows a computer called {name}.", hint="its address, such as 192.168.1.20"
        ) from None


def read_manifest(told: dict[str, Any], *, anyway: bool = False) -> Invited:
    """What a host offers. Refuses what cannot be trained together, and what this computer was never asked to trust."""
    for program, own in (("lapclip", __version__), ("torch", _torch_version())):
        theirs = one_line(told.get(program, ""))[:32]
        if theirs != own:
            raise JoinError(
                f"The host has {program} {theirs}, and here it is {own}.",
                hint=f"the same {program} on both computers",
            )
    systems = {one_line(told.get("system", ""))[:32], platform.system()}
    if "Darwin" in systems and len(systems) > 1 and not anyway:
        raise JoinError(
            f"The computers have {' and '.join(sorted(systems))}: gloo, which carries what they send each other, is "
            "reported not to connect them (gloo issue 383).",
            hint="--anyway tries it",
        )
    try:
        found = _checked(told)
    except (TypeError, ValueError, LookupError) as error:
        raise JoinError(f"What the host offers cannot be read: {one_line(error)[:100]}.") from None
    apart = abs(told["time"] - time.time())
    if apart > CLOCKS:
        raise JoinError(
            f"The clocks of the two computers differ by {apart:.0f} s, and torch's agents would take each other for "
            "dead.",
            hint="both clocks set by the network",
        )
    return found


def _checked(told: dict[str, Any]) -> Invited:
    match told:
        case {
            "run_id": str(run_id),
            "name": str(name),
            "machines": int(machines),
            "port": int(port),
            "settings": {**settings},
            "data": "drawn" | "bundled" | "streamed" as data,
            "fingerprint": str(fingerprint),
            "pairs": int(pairs),
            "files": [*files],
            "time": int() | float(),
        } if machines > 1 and 0 < port < 65536 and FINGERPRINT.fullmatch(run_id):
            pass
        case _:
            raise ValueError("something is missing")
    known = {section: settings[section] for section in SECTIONS if section in settings}
    config = build_config([Layer("the host's settings", known)], SHAPES)
    drawn = find_source(config.data.source).is_drawn
    if drawn != (data == DRAWN) or bool(files) != (data == BUNDLED) or len(files) > 100:
        raise ValueError("its data is neither drawn nor brought over")
    if data != DRAWN and not FINGERPRINT.fullmatch(fingerprint):
        raise ValueError("its data has no fingerprint")
    digests = [FileDigests.of(file) for file in files]
    compares = told.get("compares") is True
    return Invited(
        run_id,
        one_line(name)[:64],
        machines,
        port,
        config,
        data,
        fingerprint,
        pairs,
        digests,
        compares,
    )


class GuestAtWork:
    """A guest, from when it is let in to the end of the run."""

    def __init__(
        self, there: Host, shown: GuestDisplay, data: str | None = None, *, anyway: bool = False
    ) -> None:
        self._there, self._shown, self._anyway = there, shown, anyway
        self._source = absolute(data) if data else ""
        self._own = own_address(there.address)
        self._host = digest_of_bytes(f"lapclip host {there.key}".encode())[:16]
        self._agreed: Agreement | None = None
        self._fetched = 0

    def work(self) -> Joined:
        """Join the host, and train with it until it says how the run ended."""
        began = time.monotonic()
        invited = self._agree(self._there.manifest())
        self._say_plan(invited)
        try:
            with kept_awake(wanted=True):
                state, message, status = self._follow(invited)
        finally:
            self._shown.close()
            with suppress(LapclipError):
                self._there.tell(LEFT)
        where = f"{self._there.address}:{self._there.port}"
        return Joined(where, state, message, time.monotonic() - began, self._fetched, status)

    def _agree(self, told: dict[str, Any]) -> Invited:
        """What the host offers, if it is what was agreed to before, or nothing was."""
        invited = read_manifest(told, anyway=self._anyway)
        if invited.data == STREAMED and not self._source:
            raise JoinError(
                f"The host streams its images from {one_line(invited.config.data.source)}; they are not brought over.",
                hint="--data with the place of a copy on this computer",
            )
        source = self._source if invited.data == STREAMED else ""
        agreed = Agreement.on(invited.config, self._host, invited.fingerprint, source)
        if self._agreed not in (None, agreed):
            raise JoinError(
                "The host trains something else now.",
                hint="lapclip join again, and see what it shows",
            )
        self._agreed = agreed
        return invited

    def _say_plan(self, invited: Invited) -> None:
        config = invited.config
        if invited.compares:
            self._shown.say(
                f"{invited.name} ({self._there.address}) finds out how fast {counted(invited.machines, 'machine')} are "
                f"together; nothing is trained, and nothing is brought over. This one takes part as {self._own}."
            )
            return
        begins = [
            text
            for text in (config.train.start, config.model.image_from, config.model.text_from)
            if text
        ]
        data = {
            DRAWN: "Its images are drawn here",
            STREAMED: f"Its images are read from {self._source}",
            BUNDLED: f"Its data, {size(invited.bytes)}, comes into {cache_folder()}",
        }
        taught = f", taught by {one_line(config.train.teacher)}" if config.train.teacher else ""
        start = f"from {' and '.join(map(one_line, begins))}" if begins else "from nothing"
        self._shown.say(
            f"{invited.name} ({self._there.address}) trains {one_line(config.model.name)} on {invited.pairs:,} pairs, "
            f"{start}{taught}, with {counted(invited.machines, 'machine')}."
        )
        self._shown.say(f"{data[invited.data]}; no path that the host names is opened.")
        self._shown.say(
            f"Then this computer computes its share, as {self._own}; what is sent is neither encrypted nor "
            "authenticated."
        )

    def _follow(self, invited: Invited) -> tuple[str, str, int]:
        """Take part in the run until its end: the state, what the host says of it, and this guest's exit status."""
        self._fetch(invited)
        said, done_round = "", -1
        while True:
            told = self._patiently(partial(self._there.tell, READY, invited.bytes, invited.bytes))
            state, message = str(told.get("state")), one_line(told.get("message", ""))[:300]
            if state in ENDED:
                return state, message, int(state == FAILED)
            if told.get("run_id") not in (None, invited.run_id):  # the host came back
                invited, done_round = self._agree(self._patiently(self._there.manifest)), -1
                self._fetch(invited)
                continue
            if state == RUNNING and int(told.get("round") or 0) > done_round:
                doing = "Timing steps" if invited.compares else "Training"
                self._shown.say(
                    f"{doing} with the host, whose screen shows how far it is. Ctrl-C ends it on all."
                )
                ended = self._train(invited)
                if ended.status == 128 + signal.SIGTERM:
                    return (
                        STOPPED,
                        "this computer was told to end, and the others go on",
                        128 + signal.SIGTERM,
                    )
                if ended.interrupted:
                    raise KeyboardInterrupt("Interrupted; the host knows, and saves.")
                if ended.status:
                    return FAILED, "what was to be trained here ended with an error", ended.status
                done_round = ended.round if ended.status == 0 else -1
                if ended.status is None:
                    self._shown.say(
                        f"The connection to the host is lost: {one_line(ended.why)[:100]}"
                    )
            waits = {
                WAITING: "Waiting for the host to begin.",
                FULL: f"All places are taken: {message}; waiting.",
            }
            if state in waits and waits[state] != said:
                said = waits[state]
                self._shown.say(said)
            time.sleep(ASK_EVERY)

    def _fetch(self, invited: Invited) -> None:
        """Bring the data over, and go on where it was when the host is away meanwhile."""
        if not invited.files:
            return
        folder = bundle_folder(self._host, invited.fingerprint, View.of(invited.config.model))
        if not folder.exists():
            self._fetched = invited.bytes
        self._patiently(
            lambda: bring_over(folder, invited.files, self._there.read, self._reporting())
        )

    def _reporting(self) -> Report:
        told = time.monotonic() - ASK_EVERY

        def report(done: int, total: int) -> None:
            nonlocal told
            self._shown.fetching(done, total)
            if time.monotonic() - told > ASK_EVERY:
                told = time.monotonic()
                heard = self._there.tell(FETCHING, done, total)
                if heard.get("state") in (FULL, *ENDED):
                    raise JoinError(
                        f"The host does not wait for this guest: {one_line(heard.get('message'))[:200]}."
                    )

        return report

    def _train(self, invited: Invited) -> Ended:
        assert self._agreed is not None
        there = self._there
        meeting = Meeting(
            invited.run_id, there.address, invited.port, invited.machines, self._own, there.key
        )
        try:
            with self._signs_of_life():
                return train_together(meeting, ["resume"], self._agreed.variables())
        except NoAnswer as error:
            return Ended(None, error.message)

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Tell the host now and then that this guest is there."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_EVERY):
                with suppress(LapclipError):
                    self._there.tell(TRAINING)

        with suppress(LapclipError):
            self._there.tell(TRAINING)
        thread = threading.Thread(target=beat, name="lapclip-guest", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    def _patiently(self, ask: Callable[[], T]) -> T:
        """What the host answers, for as long as it takes. Says at once that it does not answer, then each minute."""
        said = -SAY_EVERY
        while True:
            try:
                return ask()
            except NoAnswer as error:
                if time.monotonic() - said >= SAY_EVERY:
                    said = time.monotonic()
                    self._shown.say(f"{error.message} Trying again until it does; Ctrl-C ends.")
            time.sleep(RETRY_EVERY)
