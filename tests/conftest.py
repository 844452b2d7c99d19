"""What tests share: a cache of their own, an empty working folder, and settings that make a run take seconds."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from lapclip.machine import other_programs

# One thread a test process: two of them share two cores, and results are compared bit for bit.
os.environ["OMP_NUM_THREADS"] = "1"

# `make test` draws the same examples each time, here and elsewhere. `make test-all` also runs the profile "random".
# Neither has a time limit: a busy machine may be slow.
WITHOUT_LIMITS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", WITHOUT_LIMITS, derandomize=True)
settings.register_profile("random", WITHOUT_LIMITS, max_examples=500, print_blob=True)
settings.load_profile("same")

# Many tests start processes. Where no bytecode is written, each of them would compile all of lapclip anew.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

# A shell that starts the tests in the background has SIGINT ignored, and every process that they start inherits that:
# those that are to end by Ctrl-C never would.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SMALL = [
    "model.name=tiny",
    "data.train_pairs=64",
    "train.batch_size=16",
    "train.steps=12",
    # Plain training: what the recipes add has tests of its own.
    "data.tokenizer=characters",
    "train.optimizer=adamw",
    "train.word_weight=0.0",
    "train.warmup=0.2",
    "train.dtype=float32",
    "train.device=cpu",
    "train.threads=1",
    # Kernels are else chosen by timing, and two runs that are compared bit for bit might get others.
    "train.image_attention=fused",
    "train.text_attention=fused",
    "train.linear=torch",
]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    os.environ["LAPCLIP_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The folder of a finished run of 12 steps, to copy from."""
    from lapclip.commands.train import train
    from lapclip.runs.folder import TrainRequest

    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(TrainRequest("first-run", tuple(SMALL)), name="mine")
    return folder / "runs" / "mine"


@pytest.fixture(scope="session")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its export as ONNX in float32, to copy from: one process of the tests makes it for all of them."""
    from lapclip.commands.export import export

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exported"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            made = tmp_path_factory.mktemp("exporting") / "mine"
            shutil.copytree(trained, made)
            export(str(made), "onnx")
            made.parent.rename(folder)
    return folder / "mine"


@pytest.fixture(autouse=True)
def quiet_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run side by side; what they time is to count as if they were alone."""
    monkeypatch.setattr(other_programs, "read_load", lambda: 0.0)
    monkeypatch.setattr(other_programs.OtherPrograms, "__call__", lambda self: 0.0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("LAPCLIP_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for all tests of a file. Tests that want it are marked `needs_browser`."""
    from .browsing import started_browser

    with started_browser() as found:
        yield found


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real photos, `flickr8k/`, `photos/` and `clothing10/`, or skip the test.

    Tests that use it are marked `real_data`. docs/data.md says where the photos come from.
    """
    folder = os.environ.get("LAPCLIP_TEST_DATA")
    if not folder:
        pytest.skip("LAPCLIP_TEST_DATA names no folder of real photos (docs/data.md)")
    if not Path(folder).is_dir():
        pytest.fail(f"LAPCLIP_TEST_DATA={folder} is no folder")
    return Path(folder)


def examples(count: int) -> int:
    """Return how many examples a test draws that draws `count` in `make test`: more with the profile "random"."""
    return count * settings().max_examples // 100


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each reading of a table of files from here on."""
    from lapclip.data.sources.files import FILES

    read, reads = FILES.read_table, []
    monkeypatch.setattr(
        FILES, "read_table", lambda config: reads.append(config.source) or read(config)
    )
    return reads


def wait_until(condition: Callable[[], object], every: float = 0.02, seconds: float = 90.0) -> None:
    """Wait until a condition holds. Fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(every)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lapclip", *arguments]


def set_flags(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def lapclip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the current folder, from its arguments to its exit status, in this process: torch is here."""
    from lapclip.cli import main

    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as end,
    ):
        main(list(arguments))
    status = end.value.code or 0
    assert isinstance(status, int)
    return subprocess.CompletedProcess(
        list(arguments), status, output.getvalue(), errors.getvalue()
    )


def run_on_full_disk(limit: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that can write no file beyond `limit` bytes."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)  # Python 3.11 would cut it off
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            return lapclip(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def lapclip_process(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, where that is what is tested."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="session")
def flickr8k(real_data: Path) -> Path:
    """Seven thousand of them, with five captions each."""
    return real_data / "flickr8k"


def pytest_collection_finish() -> None:
    """Leave what was imported out of each garbage collection: runs collect often."""
    gc.collect()
    gc.freeze()
