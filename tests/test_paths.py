"""The folders that earlier releases used, and files that are whole or not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import platformdirs
import pytest
from platformdirs import macos, unix, windows

from lapclip import paths
from lapclip.paths import (
    CacheFile,
    cache_folder,
    data_folder,
    digest_of_bytes,
    digest_of_file,
    digest_of_json,
    parse_json,
    read_bytes,
    read_toml,
    write_atomic,
)

SYSTEMS = {"linux": unix.Unix, "darwin": macos.MacOS, "win32": windows.Windows}
FOLDERS = {
    "linux": (".cache/lapclip", ".local/share/lapclip"),
    "darwin": ("Library/Caches/lapclip", "Library/Application Support/lapclip"),
    "win32": ("AppData/Local/lapclip/cache", "AppData/Local/lapclip/data"),
}
"""Under the home folder, as every release so far has had them."""


@pytest.fixture(params=FOLDERS)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Each system in turn, with a home folder of its own and nothing in the environment."""
    for name in ("LAPCLIP_CACHE", "LAPCLIP_DATA", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    local = {"CSIDL_LOCAL_APPDATA": str(tmp_path / "AppData" / "Local")}
    monkeypatch.setattr(windows, "get_win_folder", local.__getitem__)
    monkeypatch.setattr(platformdirs, "PlatformDirs", SYSTEMS[request.param])
    monkeypatch.setattr(sys, "platform", request.param)
    return request.param


def test_folders_are_those_of_earlier_releases(system: str, tmp_path: Path) -> None:
    cache, data = cache_folder(), data_folder()
    if system == "win32":  # where platformdirs writes Cache, which is the same folder there
        cache = cache.with_name(cache.name.lower())
    assert (cache, data) == tuple(tmp_path / folder for folder in FOLDERS[system])


@pytest.mark.usefixtures("system")
def test_the_environment_chooses_folders_on_every_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "d"))
    assert (cache_folder(), data_folder()) == (
        tmp_path / "c" / "lapclip",
        tmp_path / "d" / "lapclip",
    )
    monkeypatch.setenv("LAPCLIP_CACHE", str(tmp_path / "own-c"))
    monkeypatch.setenv("LAPCLIP_DATA", str(tmp_path / "own-d"))
    assert (cache_folder(), data_folder()) == (tmp_path / "own-c", tmp_path / "own-d")


@pytest.mark.parametrize("durable", [False, True])
def test_text_bytes_and_what_a_function_writes_take_the_place_of_a_file(
    durable: bool, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    for content in ("ä\nb", "ä\nb".encode(), lambda partial: partial.write_bytes("ä\nb".encode())):
        path.write_text("before")
        write_atomic(path, content, durable=durable)
        assert path.read_bytes() == "ä\nb".encode()  # no other line ends on Windows either
    assert os.listdir(tmp_path) == ["file"]


def test_a_writer_that_fails_leaves_the_file_as_it_was_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def half(partial: Path) -> None:
        partial.write_text("hal")
        raise ValueError("broke off")

    with pytest.raises(ValueError, match="broke off"):
        write_atomic(path, half)
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(OSError, match="none"):
        write_atomic(tmp_path / "none" / "file", "x")
    assert os.listdir(tmp_path) == ["file"]


def test_a_durable_file_is_on_disk_before_it_has_its_name_and_its_name_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []
    flush, replace = paths.flush, paths.replace
    monkeypatch.setattr(
        paths, "flush", lambda path: done.append(f"flush {path.is_dir()}") or flush(path)
    )
    monkeypatch.setattr(paths, "replace", lambda *names: done.append("replace") or replace(*names))
    write_atomic(tmp_path / "file", "x", durable=True)
    assert done == ["flush False", "replace", "flush True"]


@pytest.mark.parametrize(
    ("system", "failures", "tries"), [("nt", 3, 4), ("nt", 99, 6), ("posix", 99, 1)]
)
def test_a_file_that_another_program_holds_is_waited_for_on_windows(
    system: str, failures: int, tries: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, real = tmp_path / "file", os.replace
    path.write_text("before")
    tried, waited = list[int](), list[float]()

    def held(source: Path, target: Path) -> None:
        tried.append(1)
        if len(tried) <= failures:
            raise PermissionError("held")
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", held)
        patched.setattr(os, "name", system)
        patched.setattr(paths.time, "sleep", waited.append)
        if failures < tries:
            write_atomic(path, "after")
        else:
            with pytest.raises(PermissionError):
                write_atomic(path, "after")
    assert len(tried) == tries
    assert len(waited) == tries - 1
    assert waited == sorted(set(waited))  # longer each time
    assert path.read_text() == ("after" if failures < tries else "before")
    assert os.listdir(tmp_path) == ["file"]


def test_threads_that_write_the_same_file_never_mix(tmp_path: Path) -> None:
    path, contents = tmp_path / "file", [letter * 100_000 for letter in "abc"]
    path.write_text(contents[0])
    errors: list[Exception] = []

    def write(content: str) -> None:
        try:
            for _ in range(50):
                write_atomic(path, content)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_text() in contents
    assert errors == []
    assert path.read_text() in contents
    assert os.listdir(tmp_path) == ["file"]


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2
    assert digest_of_bytes(b"abc") == digest_of_file(tmp_path / "file") == known
    assert (
        digest_of_json({"a": 1, "b": [2]})
        == digest_of_json({"b": [2], "a": 1})
        != digest_of_json({"a": 1})
    )
    numbered = {2: "two", 16: "sixteen"}
    assert digest_of_json(numbered) == digest_of_json(json.loads(json.dumps(numbered)))


@pytest.mark.skipif(sys.platform == "win32", reason="a file with a hole takes a setting there")
def test_what_is_too_large_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    with open(path, "wb") as file:
        file.truncate(400 * 10**9)  # a hole: it takes no room on the disk
    with pytest.raises(OSError, match="400,000 MB"):
        read_bytes(path)
    with pytest.raises(OSError, match="400,000 MB"):
        read_toml(path)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 200_000, "[" + "[],[],[]," * 2_000_000 + "1]"]
)
def test_json_that_would_fill_memory_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|MB of memory"):
        parse_json(text)


def test_settings_that_nest_too_deeply_are_none(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("x = " + "[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_toml(tmp_path / "run.toml")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipe with a name in a folder")
def test_a_pipe_is_read_though_it_tells_no_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"some",))
    writer.start()
    assert paths.read_bytes(tmp_path / "pipe") == b"some"
    writer.join()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipe with a name in a folder")
def test_a_file_of_a_run_is_a_plain_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros", "."):
        with pytest.raises(OSError, match="no plain file"):
            read_bytes(tmp_path / name, own=True)
    with pytest.raises(OSError, match="pipe"):
        paths.open_own(tmp_path / "pipe", "a")
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", own=True)


def test_a_file_of_a_run_is_appended_to_and_made(tmp_path: Path) -> None:
    for part in ("one ", "two"):
        with paths.open_own(tmp_path / "log.txt", "a", encoding="utf-8") as file:
            file.write(part)
    assert (tmp_path / "log.txt").read_text() == "one two"


WRITES_UNTIL_KILLED = """
from lapclip.paths import CacheFile
number = 0
while True:
    CacheFile("kernels.json").write("choice", [number] * 200_000)
    print(number, flush=True)
    number += 1
"""
KILLED_BEFORE_THE_RENAME = """
import os, signal
from lapclip import paths
paths.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
paths.CacheFile("kernels.json").write("choice", "half")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_cache_file_is_whole_after_kills_and_nothing_stays_beside_it(empty_cache: Path) -> None:
    cached, found = CacheFile("kernels.json"), []
    for attempt in range(4):
        arguments = [sys.executable, "-c", WRITES_UNTIL_KILLED]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout
            child.stdout.readline()
            time.sleep(0.05 * attempt)
            child.kill()
        found = cached.read("choice")
        assert found == [found[0]] * 200_000
    killed = subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_RENAME], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(empty_cache.glob(".kernels.json.*.partial"))) == 1
    assert cached.read("choice") == found
    cached.write("choice", "made anew")
    assert os.listdir(empty_cache) == ["kernels.json"]
