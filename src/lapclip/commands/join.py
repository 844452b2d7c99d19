"""`--machines` and `lapclip join`: a host invites guests, which copy its data and train with it.

A guest trusts its host with its processor and nothing else. It opens no path that the host names, and what it agreed to
is compared with what it is given to train.
"""

from __future__ import annotations

import importlib.metadata
import platform
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lapclip import __version__
from lapclip.commands.choose_recipe import read_request
from lapclip.commands.resume import move_data
from lapclip.config import AUTO, FSDP, SECTIONS, Config, Layer, build_config
from lapclip.data.dataset import DataSet
from lapclip.data.sources import find_source
from lapclip.errors import ConfigError, JoinError, NoAnswer
from lapclip.join.agreement import AGREEMENT, Agreement
from lapclip.join.client import HostClient
from lapclip.join.key import format_key, new_key
from lapclip.join.rendezvous import MeetingPoint, listen, own_interface, train_with_others
from lapclip.join.send_data import FileDigest, copy_bundle, digest_of_bundle, files_of
from lapclip.join.server import OFFER, READY, HostServer
from lapclip.machine.desktop import kept_awake
from lapclip.model.shapes import SHAPES
from lapclip.progress import DataProgress, Progress, Status
from lapclip.runs.folder import TrainRequest, check_name, find_unfinished_run
from lapclip.suggest import command
from lapclip.text import counted, one_line, size
from lapclip.training.preparation import gather, gather_again
from lapclip.training.ranks_in_a_run import POLITE
from lapclip.training.resolvers import Context

PORT = 29400  # the rendezvous has the next one
POLL_SECONDS = 0.5
PATIENCE_SECONDS = 120.0  # for which a guest tries to reach its host again
MAX_CLOCK_SECONDS = 10.0  # torch takes a computer for dead after 15
MACS = "Several Macs train on their CPUs, because torch does not connect their GPUs."


@dataclass(frozen=True)
class Plan:
    """What a host trains, as far as it is known before the run begins."""

    config: Config
    data: DataSet


def plan_new_run(request: TrainRequest, name: str | None, progress: DataProgress | None) -> Plan:
    """Plan a new run. Refuses what several computers cannot train."""
    check_name(name)
    complete = read_request(request)
    check_settings(complete.config)
    inputs = gather(Context(complete), progress)
    return Plan(inputs.config, inputs.data)


def plan_resumed_run(
    name: str | None, moved_data: str | None, progress: DataProgress | None
) -> Plan:
    """Plan to continue a run. `moved_data` is where its data lies now, if it was moved."""
    run = find_unfinished_run(name)
    saved = run.read_settings()
    if moved_data is not None:
        move_data(saved, moved_data)
    inputs = gather_again(run, saved, progress)
    check_settings(inputs.config)
    return Plan(inputs.config, inputs.data)


def check_settings(config: Config) -> None:
    """Refuse settings with which computers at home cannot train."""
    if config.train.parallel == FSDP:
        raise ConfigError(
            "--machines trains with DDP: FSDP sends pickles, which run code on other computers.",
            hint="torchrun, in a network that you trust",
        )
    if config.work.polite:
        raise ConfigError(POLITE)
    if platform.system() == "Darwin" and config.train.device not in (AUTO, "cpu"):
        raise ConfigError(MACS, hint="--device cpu")


def versions() -> dict[str, str]:
    """Return what must be equal on all computers."""
    torch_version = importlib.metadata.version("torch").partition("+")[0]  # of any build
    return {"lapclip": __version__, "torch": torch_version, "system": platform.system()}


def invite(
    plan: Plan, machines: int, arguments: Sequence[str], say: Status, progress: Progress
) -> int:
    """Invite guests, train with them, and return the exit status of training here."""
    if plan.data.train.sequential:
        raise ConfigError(
            "--machines copies the images to all computers, and these do not fit on a disk.",
            hint="torchrun, with the shards on each computer",
        )
    if platform.system() == "Darwin":
        say(MACS)
        if plan.config.train.device == AUTO:
            arguments = [*arguments, "--device", "cpu"]
    is_drawn = find_source(plan.config.data.source).is_drawn
    files = [] if is_drawn else files_of(plan.data)
    digests = []
    for number, file in enumerate(files):
        progress(number, len(files))
        digests.append(file.digest())
    key, run_id = new_key(), secrets.token_hex(8)
    offer = {
        "versions": versions(),
        "name": platform.node(),
        "run_id": run_id,
        "machines": machines,
        "settings": asdict(plan.config),
        "fingerprint": plan.data.fingerprint,
        "pairs": len(plan.data.train),
        "files": digests,
    }
    interface, address = own_interface()
    with listen(address, PORT + 1) as listening:
        server = HostServer(
            (address, PORT), key, offer, lambda number, *ends: files[number].read(*ends)
        )
        say(
            f"On the {counted(machines - 1, 'other computer')}, type:  "
            f"{command('join', f'{address}:{PORT}')}"
        )
        say(f"The key is:  {format_key(key)}")
        say(
            "Data and gradients are not encrypted: use your home network, or WireGuard. Firewalls "
            f"must let through ports {PORT} and {PORT + 1} here, and gloo's, which the system picks."
        )
        _wait_for_guests(server, machines - 1, say)
        point = MeetingPoint(
            run_id, machines, address, PORT + 1, key, interface, address, listening
        )
        return train_with_others(point, arguments, {})


def _wait_for_guests(server: HostServer, count: int, say: Status) -> None:
    """Wait until so many guests have the data, and tell them to begin."""
    ready = 0
    while ready < count:
        time.sleep(POLL_SECONDS)
        before, ready = ready, server.count_ready()
        if ready != before:
            say(f"{ready} of {counted(count, 'guest')} ready.")
    server.is_training = True


@dataclass(frozen=True)
class Offer:
    """What a host offers, checked."""

    name: str
    run_id: str
    machines: int
    config: Config
    fingerprint: str
    pairs: int
    files: Sequence[FileDigest]

    @property
    def bytes(self) -> int:
        """Size of the data that is copied."""
        return sum(size for size, _ in self.files)


@dataclass(frozen=True)
class Joined:
    """Result of `lapclip join`."""

    host: str
    seconds: float
    copied_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_offer(message: dict[str, Any]) -> Offer:
    """Return the offer of a host. Refuses what cannot be trained with it."""
    try:
        offer = _parse_offer(message)
        theirs = {name: one_line(message["versions"][name])[:32] for name in versions()}
    except (TypeError, ValueError, LookupError) as error:
        raise JoinError(f"The host's offer is not valid: {one_line(error)[:100]}.") from None
    for name, own in versions().items():
        # gloo connects Linux with Windows, but neither with macOS (gloo issue 383).
        if theirs[name] != own and (name != "system" or "Darwin" in (own, theirs[name])):
            raise JoinError(
                f"The host has {name} {theirs[name]}, this computer has {own}: they cannot train "
                "together.",
                hint=f"computers with the same {name}",
            )
    return offer


def _parse_offer(message: dict[str, Any]) -> Offer:
    match message:
        case {
            "name": str(name),
            "run_id": str(run_id),
            "machines": int(machines),
            "settings": {**settings},
            "fingerprint": str(fingerprint),
            "pairs": int(pairs),
            "files": [*files],
        } if machines > 1 and run_id.isalnum():
            pass
        case _:
            raise ValueError("something is missing")
    known = {section: settings[section] for section in SECTIONS}
    config = build_config([Layer("the host's settings", known)], SHAPES)
    if find_source(config.data.source).is_drawn == bool(files):
        raise ValueError("its images are neither drawn nor copied")
    digests = [(int(size), str(digest)) for size, digest in files]
    return Offer(one_line(name)[:64], run_id, machines, config, fingerprint, pairs, digests)


def join(host: HostClient, say: Status, progress: Progress) -> Joined:
    """Copy the data of a host, and train with it until its run ends."""
    began = time.monotonic()
    offer = read_offer(host.get_json(OFFER))
    say(_describe(offer))
    if offer.files:
        copy_bundle(offer.files, host.read, progress)
    interface, address = own_interface(host.address)
    place = (host.address, host.port + 1)
    point = MeetingPoint(offer.run_id, offer.machines, *place, host.key, interface, address)
    agreement = Agreement.on(offer.config, offer.fingerprint, digest_of_bundle(offer.files))
    with kept_awake():
        _train(host, point, {AGREEMENT: agreement.to_json()}, say)
    return Joined(host.place, time.monotonic() - began, offer.bytes)


def _train(host: HostClient, point: MeetingPoint, variables: dict[str, str], say: Status) -> None:
    """Train until the run ends, again if the host could not be reached for a while."""
    say("Waiting for the host to begin.")
    lost_since = None
    path = f"{READY}/{secrets.token_hex(8)}"
    while True:
        try:
            message = host.get_json(path)
            lost_since = None
            if message["is_training"] is True:
                _check_clock(message["time"])
                say("Training with the host, which shows the progress. Ctrl-C ends it everywhere.")
                status = train_with_others(point, ["resume"], variables)
                break
        except NoAnswer as error:
            if lost_since is None:
                say(f"{error.message} Trying again for {PATIENCE_SECONDS:.0f} seconds.")
                lost_since = time.monotonic()
            if time.monotonic() > lost_since + PATIENCE_SECONDS:
                raise
        time.sleep(POLL_SECONDS)
    if status > 128:
        raise KeyboardInterrupt("Interrupted. The host has saved the run.")
    if status:
        raise JoinError("This computer cannot train with the host; the reason is above.")


def _check_clock(host_time: float) -> None:
    difference = abs(time.time() - host_time)
    if difference > MAX_CLOCK_SECONDS:
        raise JoinError(
            f"The clocks of the computers differ by {difference:.0f} s, and torch would take each for "
            "dead.",
            hint="clocks that the network sets",
        )


def _describe(offer: Offer) -> str:
    """Return what will be trained, with everything that this computer has to trust."""
    train, model = offer.config.train, offer.config.model
    origins = [name for name in (train.start, model.image_from, model.text_from) if name]
    start = one_line(" and ".join(origins)) or "random weights"
    taught = f", taught by {one_line(train.teacher)}" if train.teacher else ""
    data = f"Its data, {size(offer.bytes)}, is copied." if offer.files else "Its images are drawn."
    return (
        f"{offer.name} trains {one_line(model.name)} on {offer.pairs:,} pairs, from {start}{taught}, "
        f"with {counted(offer.machines, 'computer')}. {data} No path that it names is opened here. "
        "Nothing is encrypted."
    )


def parse_place(place: str) -> tuple[str, int]:
    """Return the address and the port of HOST:PORT. The usual port without one."""
    name, _, number = place.partition(":")
    number = number or str(PORT)
    if not name or not (number.isascii() and number.isdigit() and 0 < int(number) < 65535):
        raise ConfigError(f"{place!r} is not HOST:PORT.", hint="the line that the host shows")
    try:
        return socket.gethostbyname(name), int(number)
    except OSError:
        raise JoinError(f"No computer is called {name!r}.", hint="its address") from None
