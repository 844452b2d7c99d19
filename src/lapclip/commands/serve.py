"""Serve a model until Ctrl-C: which one, by which engine, to whom, and how a newer one takes its place."""

from __future__ import annotations

import codecs
import io
import ipaddress
import math
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lapclip.errors import ConfigError
from lapclip.paths import LARGEST_SETTINGS, read_bytes
from lapclip.progress import Progress, Status
from lapclip.suggest import command, install, quoted
from lapclip.text import duration, printable
from lapclip.web.server import check_port
from lapclip.which_model import WhichModel, which_model

if TYPE_CHECKING:
    from lapclip.serving.choose_engine import EngineRequest
    from lapclip.serving.engine import Engine
    from lapclip.serving.folder_search import FolderSearch
    from lapclip.serving.model_forms import Stamps
    from lapclip.serving.service import ServedModel, Service

FIRST_PORT = 8871
PACKAGES = ("fastapi", "orjson", "prometheus_client", "python_multipart")
LEAST_KEY = 16
"""Characters of an API key."""
LONGEST_DEADLINE = 3600
"""Seconds."""
MAKE_KEY = 'python -c "import secrets; print(secrets.token_urlsafe(32))" > key.txt'


@dataclass(frozen=True)
class ServeOptions:
    """What the user chose."""

    model: str | None = None
    port: int | None = None
    host: str = "127.0.0.1"
    api_key_file: Path | None = None
    name: str | None = None
    engine: str | None = None
    threads: int | None = None
    cache_megabytes: int = 64
    allow_hosts: tuple[str, ...] = ()
    follow: bool = False
    deadline: float = 30.0
    search: Path | None = None
    allow_urls: bool = False
    immich: bool = False
    immich_upstream: str | None = None

    @property
    def asked(self) -> EngineRequest:
        """What it fixes of the engine."""
        from lapclip.serving.choose_engine import EngineRequest

        return EngineRequest(self.engine, self.threads)

    def again(self, *words: object) -> str:
        """The command with some words more."""
        model = [self.model] if self.model else []
        host = ["--host", self.host] if self.host != ServeOptions.host else []
        search = ["--search", self.search] if self.search else []
        names = [word for name in self.allow_hosts for word in ("--allow-host", name)]
        key = ["--api-key-file", self.api_key_file] if self.api_key_file else []
        return command("serve", *model, *host, *names, *search, *key, *words)


@dataclass(frozen=True)
class OpenedService:
    """Everything that answers requests. Only the service holds the model, so that a swap frees it."""

    options: ServeOptions
    which: WhichModel
    stamps: Stamps
    """Of the model's files, from before it was opened."""
    key: str | None
    names: tuple[str, ...]
    """Names of this server beside those of this machine."""
    notes: list[str]
    """What is printed first: the model, its engine and the key."""
    facts: dict[str, Any]
    """Facts about the model and its engine for `--json`."""
    service: Service
    make_model: Callable[[Engine], ServedModel]
    search: FolderSearch | None


class Hangups:
    """SIGHUP as a request to look for a newer model. One from before the server answers is kept.

    If the signal means that the terminal is gone, it ends the server as SIGTERM does.
    """

    def __init__(self) -> None:
        self._in_terminal = os.isatty(2)
        self._is_pending = False
        self._ask: Callable[[], None] | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self._in_terminal and not os.isatty(2):
            signal.raise_signal(signal.SIGTERM)
        elif self._ask is None:
            self._is_pending = True
        else:
            self._ask()

    def forward_to(self, ask: Callable[[], None]) -> None:
        """Call `ask` for each signal from now on, and for one that has come already."""
        self._ask = ask
        if self._is_pending:
            ask()


@contextmanager
def taking_hangups() -> Iterator[Hangups]:
    """Handle SIGHUP, if the system has it and nobody chose to ignore it."""
    hangups = Hangups()
    number = getattr(signal, "SIGHUP", None)
    if number is None or signal.getsignal(number) is signal.SIG_IGN:
        yield hangups
        return
    try:
        before = signal.signal(number, hangups.receive)
    except ValueError:  # not in the main thread
        yield hangups
        return
    try:
        yield hangups
    finally:
        signal.signal(number, before)


def open_service(
    options: ServeOptions,
    status: Status = lambda _: None,
    progress: Progress | None = None,
    waiting: Status | None = None,
) -> OpenedService:
    """Check the options, open the model by the fastest or the requested engine, and index the folder to search."""
    check_packages()
    _check_numbers(options)
    names = tuple(_host_name(name, options) for name in options.allow_hosts)
    key, notes = _key_of(options)
    which = which_model(options.model)
    check_port(options.host, options.port, FIRST_PORT, options.again())

    # Imported here, so that mistakes in the options are reported at once.
    from lapclip.serving.choose_engine import check_finite, open_engine
    from lapclip.serving.folder_search import FolderSearch
    from lapclip.serving.metrics import Metrics
    from lapclip.serving.model_forms import Stamps
    from lapclip.serving.service import Limits, ServedModel, Service

    stamps = Stamps.of(which)  # before the model is opened: what is saved meanwhile is newer
    engine = open_engine(which, options.asked, status)
    check_finite(engine)
    name, metrics = served_name(options, which), Metrics()
    limits = Limits(deadline=options.deadline, cache_bytes=options.cache_megabytes * 1_000_000)

    def make_model(engine: Engine) -> ServedModel:
        return ServedModel(name, engine, limits.cache_bytes, metrics.batch)

    service = Service(make_model(engine), limits, metrics, allow_urls=options.allow_urls)
    search = None
    if options.search:
        search = FolderSearch(options.search, service, which, progress, waiting)
    notes = [*describe_model(name, which, engine, options), *notes]
    facts = {
        "model": name,
        "path": str(which.path),
        "fingerprint": engine.fingerprint,
        "engine": engine.name,
        "device": engine.device,
        "threads": engine.threads,
        "batches": {tower: engine.largest_batch(tower) for tower in ("image", "text")},
        "reasons": engine.reasons,
    }
    return OpenedService(
        options, which, stamps, key, names, notes, facts, service, make_model, search
    )


def served_name(options: ServeOptions, which: WhichModel) -> str:
    """Return what callers see: the run's name, or the last part of a path. A file's name may be no text."""
    return printable(options.name or (which.name if which.made_by else which.path.name))


def serve(
    opened: OpenedService,
    hangups: Hangups,
    as_json: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Serve a model until a signal ends it. KeyboardInterrupt where requests were left unanswered.

    `as_json` gets what a script has to know, and all for people goes to stderr; without it, to stdout.
    """
    from lapclip.serving.app import make_app
    from lapclip.serving.dialects import immich
    from lapclip.serving.gate import OPEN, Gate
    from lapclip.serving.swap import Swapper
    from lapclip.web.server import Announcement, serve_until_interrupted

    options, which, key, service, search = (
        opened.options,
        opened.which,
        opened.key,
        opened.service,
        opened.search,
    )
    limits = service.limits
    swapper = Swapper(
        service,
        which,
        opened.make_model,
        opened.stamps,
        asked=options.asked,
        follow=options.follow,
        log=log,
    )
    output = sys.stderr if as_json else sys.stdout
    # The token in the page's address opens everything: it does not belong into journals and log files.
    shows_token = key is None or output.isatty()
    said = io.StringIO()

    def ready(link: str) -> None:
        url = link.partition("?")[0].rstrip("/")
        print(
            said.getvalue() if shows_token else said.getvalue().replace(link, f"{url}/"),
            end="",
            file=output,
        )
        if not shows_token and not as_json:
            print(
                "The page's address needs a token, which is printed in a terminal and by --json.",
                file=output,
            )
        print(
            f"Try: {curl_command(url, options.api_key_file)}",
            file=output,
            flush=True,
        )
        if as_json:
            as_json({"url": url, "page": link, **opened.facts})

    def at_end() -> None:
        if not service.draining:
            log("ending: what was accepted is answered; a second signal waits for nobody")
        service.draining = True
        swapper.stop()

    def guard(app: Any, door: Any) -> Any:
        if key is None and door.any_address:  # a name of this computer that leads beyond it
            raise _needs_key(options)
        return Gate(app, service, door, key, (*OPEN, *immich.OPEN) if options.immich else OPEN)

    announcement = Announcement(
        options.again(),
        "Page",
        _who_can_ask(key, shows_token),
        "Ctrl-C ends it.",
        notes=opened.notes,
    )
    try:
        hangups.forward_to(swapper.ask)
        with which.in_use():
            all_answered = serve_until_interrupted(
                make_app(service, search, options.immich_upstream),
                announcement,
                options.host,
                options.port,
                FIRST_PORT,
                at_end=at_end,
                output=said,
                ready=ready,
                guard=guard,
                token=key is not None,
                names=opened.names,
                connections=limits.connections,
                patience=max(1, round(limits.deadline)),
                started=swapper.start,
            )
    finally:
        swapper.stop()
        if search is not None:
            search.close()
        service.close()
    if not all_answered:
        raise KeyboardInterrupt("Ended before all requests were answered.")


def log(line: str) -> None:
    """One line for whoever runs the server. Never what callers send, nor a key."""
    print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {printable(line)}", file=sys.stderr, flush=True)


def check_packages() -> None:
    """Refuse where the extra is not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"lapclip serve needs {', '.join(missing)}.", hint=install("serve"))


def _check_numbers(options: ServeOptions) -> None:
    for name, value, least, most in (
        ("--threads", options.threads, 1, math.inf),
        ("--cache", options.cache_megabytes, 0, math.inf),
        ("--deadline", options.deadline, 0.1, LONGEST_DEADLINE),
    ):
        if value is not None and not least <= value <= most:
            limits = f"{least} or more" if most == math.inf else f"{least} to {most}"
            raise ConfigError(
                f"{name} must be {limits}, not {value}.", hint=options.again(name, max(1, least))
            )


def _host_name(given: str, options: ServeOptions) -> str:
    """The name in what callers type, which may hold a scheme and a port."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(given))
    name = None
    with suppress(ValueError):
        name = urlsplit(given if "//" in given else f"//{given}").hostname
    if name is None or not re.fullmatch(r"[a-z0-9_.-]+|[0-9a-f:]+", name):
        key = options.api_key_file or Path("key.txt")
        right = replace(options, allow_hosts=("clip.example.org",), api_key_file=key)
        raise ConfigError(
            f"--allow-host takes the name of a host, not {printable(given)}.", hint=right.again()
        )
    return name


def _key_of(options: ServeOptions) -> tuple[str | None, list[str]]:
    """The API key, and what is to be said of it. Beyond this computer there has to be one."""
    if options.api_key_file is not None:
        return read_key(options.api_key_file)
    if not _is_this_computer(options.host):
        raise _needs_key(options)
    if options.allow_hosts:
        raise ConfigError(
            f"With --allow-host {printable(options.allow_hosts[0])} an API key is needed: whoever reaches that name "
            "could ask.",
            hint=f"{MAKE_KEY}, then {options.again('--api-key-file', 'key.txt')}",
        )
    if options.search is not None:
        raise ConfigError(
            "With --search an API key is needed: other accounts of this computer reach the server too.",
            hint=f"{MAKE_KEY}, then {options.again('--api-key-file', 'key.txt')}",
        )
    return None, []


def _needs_key(options: ServeOptions) -> ConfigError:
    return ConfigError(
        f"Beyond this computer ({options.host}) an API key is needed: without one, everybody who reaches it could ask.",
        hint=f"{MAKE_KEY}, then {options.again('--api-key-file', 'key.txt')}",
    )


def _is_this_computer(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_key(path: Path) -> tuple[str, list[str]]:
    """The API key in a file, and a warning where other accounts can read it."""
    try:
        content = read_bytes(path, LARGEST_SETTINGS, own=True)
        # Windows PowerShell 5.1 writes what a program prints as UTF-16.
        key = content.decode(
            "utf-16" if content.startswith(codecs.BOM_UTF16_LE) else "utf-8-sig"
        ).strip()
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ConfigError(
            f"There is no file {path}.", hint=MAKE_KEY.replace("key.txt", quoted(str(path)))
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise ConfigError(f"{path} holds no API key: {why}.", hint=MAKE_KEY) from None
    if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{path} holds no API key: one line of {LEAST_KEY} or more ASCII characters without spaces.",
            hint=MAKE_KEY,
        )
    exposed = os.name != "nt" and mode & (stat.S_IRGRP | stat.S_IROTH)
    return key, [
        f"Other accounts can read {path}: chmod 600 {quoted(str(path))}"
    ] if exposed else []


def describe_model(
    name: str, which: WhichModel, engine: Engine, options: ServeOptions
) -> list[str]:
    """Return what is served, by which engine, and why."""
    path = "" if str(which.path) == name else f" ({printable(which.path)})"
    lines = [f"model {name}{path}, fingerprint {engine.fingerprint}: {which.why}"]
    requested = " (as asked)" if options.engine else ""
    lines.append(f"chosen{requested}: {engine.reasons[0]}")
    lines += [f"  {reason}" for reason in engine.reasons[1:]]
    if options.follow:
        lines.append(
            f"follows {printable(which.path)}: a newer model is taken when it has passed its check"
        )
    return [*lines, f"deadline of a request: {duration(options.deadline)} (--deadline)"]


def _who_can_ask(key: str | None, shows_token: bool) -> str:
    if key is None:
        return "Everybody on this computer can ask, and nobody else."
    return (
        "Whoever has the key, or this address, can ask."
        if shows_token
        else "Whoever has the key can ask."
    )


BODY = '{"items": [{"text": "a red bicycle"}]}'


def curl_command(url: str, key_file: Path | None) -> str:
    """Return a request that can be pasted. On Windows no quoting of JSON suits both shells."""
    if os.name == "nt":
        return f"curl.exe {url}/ready"
    words = ["curl", quoted(f"{url}/embed")]
    if key_file is not None:
        words += ["-H", f'"Authorization: Bearer $(cat {quoted(str(key_file))})"']
    words += ["-H", quoted("Content-Type: application/json"), "-d", quoted(BODY)]
    return " ".join(words)
