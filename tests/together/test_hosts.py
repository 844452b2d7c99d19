"""Two hosts, each in a network namespace of its own, train one model: what they learn is what one process learns."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import SMALL, command, set_flags
from ..hosts import Hosts, missing
from ..small_runs import events, losses, train_small

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

FEW = ["train.steps=8", "data.train_pairs=32"]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(2, tmp_path / "hosts") as hosts:
        yield hosts


def answers(hosts: Hosts, host: int, of: int) -> bool:
    """Whether a host is answered by another within a second."""
    program = f"import socket; socket.create_connection(('{hosts.address(of)}', 8000), timeout=1)"
    return (
        hosts.start(host, [*command()[:1], "-c", program], stderr=subprocess.DEVNULL).wait(20) == 0
    )


@pytest.mark.slow  # tests/training/test_distributed.py compares two ranks with one process each time
def test_two_hosts_learn_what_one_process_does(
    two: Hosts, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["-m", "lapclip", "train", "--name", "run", *set_flags(*SMALL, *FEW)]
    started = [
        two.start(host, two.torchrun(host, arguments), stderr=subprocess.PIPE) for host in range(2)
    ]
    train_small(*FEW)
    said = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    alone = losses()
    monkeypatch.chdir(two.folder(0))
    assert losses() == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 8
    assert len(events("finished")) == 1
    assert not (two.folder(1) / "runs").exists()


def test_a_link_that_is_down_carries_nothing_until_it_is_up(two: Hosts) -> None:
    two.start(1, [*command()[:1], "-m", "http.server", "8000"], stderr=subprocess.DEVNULL)
    assert any(answers(two, 0, of=1) or time.sleep(0.1) for _ in range(100))
    two.take_down(1)
    assert not answers(two, 0, of=1)
    two.bring_up(1)
    assert answers(two, 0, of=1)
    two.kill(1)
    assert not two.processes(1)
    assert not answers(two, 0, of=1)


def test_nothing_is_left_of_hosts() -> None:
    with Hosts(2) as hosts:
        sleeping = hosts.start(0, ["sleep", "600"])
        hosts.limit(1e9)
        listed = subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True, check=True
        ).stdout
        assert hosts._namespace(0) in listed
    assert sleeping.returncode is not None
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert hosts._namespace(0) not in listed
    assert not hosts.folder(0).exists()
