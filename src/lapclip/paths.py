"""Folders, files that are read in bounded memory and written whole or not at all, digests of what is in them, and files
of what was measured on this machine before."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import platformdirs

if sys.platform == "darwin":
    import fcntl


ABANDONED_SECONDS = 86_400  # after which something half-made by an unknown process is left behind
_PARTIAL_NAME = re.compile(r"^\..+\.(?P<process>\d+)-\d+-(?P<host>[A-Za-z0-9]*)\.(?:partial|old)$")


def cache_folder() -> Path:
    """Where things that can be made again lie: LAPCLIP_CACHE, or the system's folder for caches."""
    return _chosen_folder("CACHE") or platformdirs.user_cache_path("lapclip", appauthor=False)


def data_folder() -> Path:
    """Where things lie that take long to make again: LAPCLIP_DATA, or the system's folder for a program's data."""
    below = "data" if sys.platform == "win32" else ""  # where caches lie in the same folder
    return _chosen_folder("DATA") or platformdirs.user_data_path("lapclip", appauthor=False) / below


def _chosen_folder(kind: str) -> Path | None:
    """What the environment asks for. XDG's variables count on every system."""
    if chosen := os.environ.get(f"LAPCLIP_{kind}"):
        return Path(chosen)
    home = os.environ.get(f"XDG_{kind}_HOME")
    return Path(home) / "lapclip" if home else None


LARGEST_FILE = 250_000_000
"""Bytes of an image or a table in one piece that are read into memory; twice that is what one file may take there."""
LARGEST_SETTINGS = 1_000_000
"""Bytes of a file of settings; real ones have some thousand."""
_NESTED_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){50}""")
"""A key of fifty parts, which no setting has, and which takes a time that grows with their square."""
LARGEST_VALUES, VALUES_A_BYTE = 400_000_000, 8
"""Bytes that the values in a JSON text may take in memory: so many, or so many times its own. COCO's captions take five
times their size; a text of brackets would take seventy times its own."""
_JUNCTION = 0xA0000003
"""What Windows calls a folder that leads to another one, and that is no symbolic link there."""


def open_own(path: str | os.PathLike[str], mode: str = "rb", **text: Any) -> IO[Any]:
    """Open a file of a run, whose folder may come from elsewhere: to read it (`rb`), append (`a`) or change it (`r+b`).

    OSError where it is no plain file: a pipe would be waited for without end. To write it must not be a link either,
    nor have a second name: another file would be written.
    """
    writes = mode != "rb"

    def opened(name: str, flags: int) -> int:
        if writes and is_link(
            name
        ):  # where the system has no O_NOFOLLOW, and for its message where it has
            raise OSError(errno.ELOOP, "it is a link")
        flags |= getattr(os, "O_NONBLOCK", 0) | (getattr(os, "O_NOFOLLOW", 0) if writes else 0)
        descriptor = os.open(name, flags, 0o666)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and not (writes and status.st_nlink > 1):
            return descriptor
        os.close(descriptor)
        raise OSError(
            errno.EINVAL, "it is a link" if stat.S_ISREG(status.st_mode) else "it is no plain file"
        )

    return open(path, mode, opener=opened, **text)


def check_plain(path: str | os.PathLike[str]) -> None:
    """Raise OSError where a library that opens the file itself would wait for a pipe, or where there is none."""
    open_own(path).close()


def is_link(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a symbolic link or, on Windows, a junction."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(status.st_mode) or getattr(status, "st_reparse_tag", 0) == _JUNCTION


def has_second_name(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a hard link: what is written to it shows under another name, too."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink > 1


def make_private(folder: Path) -> None:
    """Make a folder that is its owner's alone, and missing folders above it. Narrow wider rights."""
    for above in reversed([path for path in folder.parents if not path.exists()]):
        above.mkdir(0o700, exist_ok=True)
    folder.mkdir(0o700, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        with suppress(PermissionError):  # another's folder, or a disk that knows no rights
            folder.chmod(0o700)


def first_link(folder: Path) -> Path | None:
    """The first link in a folder, or in one below it. The folder itself may be one."""
    for root, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            if is_link(path := Path(root, name)):
                return path
    return None


def read_bytes(
    path: str | os.PathLike[str], most: int = LARGEST_FILE, *, own: bool = False
) -> bytes:
    """A file's content. One that is larger is an OSError before any memory is taken: a file may claim any size. What
    the user names may be a pipe; with `own`, as `open_own` has it, it may not."""
    with open_own(path) if own else open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        check_size(size, most)
        content = file.read(most + 1) if not size else file.read(size)  # a pipe has no size to tell
    check_size(len(content), most)
    return content


def read_toml(path: str | os.PathLike[str], *, own: bool = False) -> dict[str, Any]:
    """The settings in a file. Raises OSError, or ValueError where it is no TOML."""
    try:
        text = read_bytes(path, LARGEST_SETTINGS, own=own).decode("utf-8")
        if _NESTED_KEY.search(text):
            raise ValueError("a key in it has too many parts")
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """What is in a JSON file of a run or a model. Raises OSError, or ValueError where it is no JSON."""
    return parse_json(read_bytes(path, own=True).decode("utf-8"))


def parse_json(text: str) -> Any:
    """What a JSON text says. Raises ValueError where it is none, nests too deeply or would take too much memory."""
    values = 184 * text.count("{") + 64 * (
        text.count("[") + text.count(",")
    )  # as CPython has them, with their places
    if values > max(LARGEST_VALUES, VALUES_A_BYTE * len(text)):
        raise ValueError(f"its values would take about {values / 1e6:,.0f} MB of memory")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_size(size: int, most: int = LARGEST_FILE) -> None:
    """Raise OSError where something has more bytes than are read."""
    if size > most:
        raise OSError(f"it has {size / 1e6:,.0f} MB, and at most {most / 1e6:,.0f} MB are read")


def write_atomic(
    path: Path, content: str | bytes | Callable[[Path], Any], *, durable: bool = False
) -> None:
    """Write a file so that readers, and whoever comes after a crash, find it whole: as it was, or as it is to be.

    Content is text, bytes, or a function that writes to the path it is given. With `durable`, it is on disk before
    this returns. What fails raises OSError and leaves nothing behind.
    """
    partial = partial_path(path)
    try:
        if isinstance(content, str):
            partial.write_text(content, encoding="utf-8", newline="\n")
        elif isinstance(content, bytes):
            partial.write_bytes(content)
        else:
            content(partial)
        if durable:
            flush(partial)
        replace(partial, path)
        if durable:
            flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def partial_path(path: Path, ending: str = "partial") -> Path:
    """A name beside the path for what is not whole yet, or is about to go. It tells whose it is: see `sweep`."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}-{_host()}.{ending}")


def _host() -> str:
    """This computer, as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]", "", platform.node())[:32]


def leftovers(folder: Path, name: str = "*") -> list[Path]:
    """What killed processes left half-made in a folder, of the things called `name`: nobody will finish it. A folder
    that is a link has nothing of ours."""
    if folder.is_symlink():
        return []
    found = [*folder.glob(f"{name}.partial"), *folder.glob(f"{name}.old")]  # hidden ones among them
    return sorted(path for path in found if not path.is_symlink() and _is_abandoned(path))


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left half-made there."""
    for path in leftovers(folder, name):
        remove(path)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """A folder that is gone afterwards. Where its process is killed, the next one that wants such a folder removes it:
    it may have a model in it, and /tmp may be memory."""
    around = Path(tempfile.gettempdir())
    sweep(around, f".lapclip-{kind}-*")
    folder = partial_path(around / f"lapclip-{kind}-{secrets.token_hex(4)}")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        remove(folder)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, as far as it can be; nothing that a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def remove_whole(path: Path) -> None:
    """Remove a file or a folder, first out of sight: whoever looks, and whoever comes after a crash, finds all of it or
    nothing. Raises OSError where it stays as it was: Windows keeps what a program has open."""
    gone = hidden_path(path)
    replace(path, gone)
    remove(gone)


def hidden_path(path: Path) -> Path:
    """A name beside the path under which it does not count, as `partial_path`, and that nothing left behind has."""
    return partial_path(path.with_name(f"{path.name}.{time.monotonic_ns()}"))


def _is_abandoned(path: Path) -> bool:
    """Return whether the process in a partial file's name is gone. For another computer, age decides."""
    import psutil  # not for a command that only prints its help

    try:
        changed = path.stat().st_mtime
    except OSError:
        return False
    match = _PARTIAL_NAME.search(path.name)
    if not match:
        return False  # not ours
    old = time.time() - changed > ABANDONED_SECONDS
    if match["host"] != _host():
        return old
    try:
        process = psutil.Process(int(match["process"]))
        # Its number may have been given out again; a clock that was set makes processes look younger, too.
        return old and process.create_time() > changed + 2
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def replace(source: Path, target: Path) -> None:
    """Rename over the target, retrying while another program (a virus scanner, an indexer) holds it on Windows."""
    for wait in (0.05, 0.1, 0.2, 0.4, 0.8, None):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if os.name != "nt" or wait is None:
                raise
            time.sleep(wait)


def flush(path: Path) -> None:
    """Make the system write a file, or the names in a folder, to disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot flush a folder, and keeps renames in order by itself
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        if sys.platform == "darwin":  # fsync there leaves data in the drive's own cache
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of_bytes(data: bytes) -> str:
    """SHA-256 as 64 hexadecimal digits; twice as fast as others where processors know it, as most do."""
    return hashlib.sha256(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file's content. OSError where it is no plain file."""
    with cast(io.BufferedReader, open_own(path)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_json(content: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys; the same before it is written as JSON and afterwards."""
    # JSON makes texts of keys that are numbers, which sort otherwise: 2 is before 16, "16" before "2".
    as_read = json.loads(json.dumps(content))
    return digest_of_bytes(json.dumps(as_read, sort_keys=True).encode())


_WRITING = threading.Lock()
"""So that of two threads that store something neither overwrites what the other stored."""


class CacheFile:
    """A JSON file of entries in the cache folder. A damaged one is ignored with a warning; one that cannot be written
    remembers nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def path(self) -> Path:
        return cache_folder() / self._name

    def read(self, key: str) -> Any:
        """What was written under the key, or None."""
        return self.entries().get(key)

    def write(self, key: str, value: Any) -> None:
        """Store a value beside the others."""
        with _WRITING:
            self.replace({**self.entries(), key: value})

    def replace(self, entries: dict[str, Any]) -> None:
        """Store these entries alone. Other processes may read and write at the same time."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            sweep(self.path.parent, f".{self._name}.*")
            write_atomic(self.path, json.dumps(entries, indent=1))

    def entries(self) -> dict[str, Any]:
        """Everything that is stored."""
        try:
            entries = read_json(self.path)
            if isinstance(entries, dict):
                return entries
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            pass
        print(f"{self.path} is damaged; what it remembered is measured again.", file=sys.stderr)
        return {}
