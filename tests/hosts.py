"""Several computers out of one: network namespaces joined by a switch, each with a core, an address and a name.

Processes of one host reach those of another over a link alone, which can be shaped and taken down. So two hosts behave
as two computers do, also where one of them vanishes. Linux, root, and `ip` and `tc` of iproute2; `missing` says what is
not there. Tests, `benchmarks/peers_together.py` and `benchmarks/ranks_faults.py` use it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Self

ROOT = Path(__file__).parents[1]
PROGRAMS = ("ip", "tc", "taskset", "unshare")
INTERFACE, BRIDGE = "eth0", "switch"
TORCHRUN = ("-m", "torch.distributed.run")
"""What `torchrun` stands for, after the name of an interpreter."""
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Variables for hosts that come and go. Without it the agent that leads (torch 2.13) tells its address in the first
round only, and one that is started later waits a minute for it in vain."""
PORT = 29510
"""Where ranks meet, on the first host. Every set of hosts has all ports to itself."""
LEAST_BURST = 1 << 18
"""Bytes that pass a limited link at once: several of the largest packets that a host hands to it."""
QUEUE = "200ms"
"""What a limited link holds back before it drops packets, as a switch does."""
# A name and a table of names for the host, which every process on it sees; then the command itself, under the same pid.
ENTER = (
    'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"'
)


@cache
def missing() -> str:
    """Why there can be no hosts here; empty where there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if absent := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(absent)} not found; Debian's: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with Hosts(1) as hosts:
            done = hosts.start(0, ["true"], stderr=subprocess.PIPE)
            said = done.communicate(timeout=20)[1]
            return (
                f"no process can be started in a network namespace here: {said.strip()}"
                if done.returncode
                else ""
            )
    except OSError as error:
        return f"network namespaces cannot be made here: {error}"


class Hosts:
    """Computers in a network of their own, numbered from 0. Used as a context; nothing of them is left after it."""

    def __init__(self, count: int, folder: Path | None = None) -> None:
        self.count = count
        self._prefix = f"lapclip-{os.getpid()}-{os.urandom(3).hex()}"
        self._own_folder = folder is None
        self._folder = Path(tempfile.mkdtemp(prefix="lapclip-hosts-")) if folder is None else folder
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            _remove_abandoned()
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", BRIDGE, "up")
        names = [
            "127.0.0.1 localhost",
            *(f"{self.address(host)} {self.name(host)}" for host in range(self.count)),
        ]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._names.write_text("\n".join(names) + "\n")
        for host in range(self.count):
            space, port = self._namespace(host), f"port{host}"
            _run("ip", "netns", "add", space)
            peer = ["peer", "name", INTERFACE, "netns", space]
            _run("ip", "-n", self._switch, "link", "add", port, "type", "veth", *peer)
            _run("ip", "-n", self._switch, "link", "set", port, "master", BRIDGE, "up")
            _run("ip", "-n", space, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _run("ip", "-n", space, "link", "set", INTERFACE, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            self.folder(host).mkdir(exist_ok=True)

    def close(self) -> None:
        """End all processes and take everything apart."""
        for host in range(self.count):
            with suppress(OSError):
                self.kill(host)
        for process in self._processes:
            process.wait()
        for space in [*(self._namespace(host) for host in range(self.count)), self._switch]:
            with suppress(OSError):  # of one that was never made
                _run("ip", "netns", "delete", space)
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # What a host is

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-switch"

    @property
    def _names(self) -> Path:
        return self._folder / "names"

    def _namespace(self, host: int) -> str:
        return f"{self._prefix}-{host}"

    def address(self, host: int) -> str:
        return f"10.78.0.{host + 1}"

    def name(self, host: int) -> str:
        return f"host-{host + 1}"

    def folder(self, host: int) -> Path:
        """Where the processes of a host work. No other host looks there."""
        return self._folder / self.name(host)

    # Links

    def limit(self, bits_a_second: float | None = None, delay_seconds: float = 0.0) -> None:
        """Limit every link in both directions; without arguments they are as fast as the machine. A delay, each way,
        needs a kernel with netem."""
        for host in range(self.count):
            inner, outer = (self._namespace(host), INTERFACE), (self._switch, f"port{host}")
            for space, device in (inner, outer):
                with suppress(OSError):  # of a link that has no limit
                    _run("tc", "-n", space, "qdisc", "delete", "dev", device, "root")
                if bits_a_second:
                    burst = max(LEAST_BURST, int(bits_a_second / 8 / 250))
                    shaped = [
                        "tbf",
                        "rate",
                        f"{int(bits_a_second)}bit",
                        "burst",
                        str(burst),
                        "latency",
                        QUEUE,
                    ]
                    _run(
                        "tc",
                        "-n",
                        space,
                        "qdisc",
                        "add",
                        "dev",
                        device,
                        "root",
                        "handle",
                        "1:",
                        *shaped,
                    )
            if delay_seconds:
                where = ["parent", "1:1"] if bits_a_second else ["root"]
                later = ["netem", "delay", f"{delay_seconds * 1e6:.0f}us"]
                _run("tc", "-n", inner[0], "qdisc", "add", "dev", INTERFACE, *where, *later)

    def take_down(self, host: int) -> None:
        """Pull the host's cable: what is under way is lost, and nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def bring_up(self, host: int) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "up")

    # Processes

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        core: int | None = None,
        variables: Mapping[str, str] | None = None,
        stdout: int | IO[str] | None = subprocess.DEVNULL,
        stderr: int | IO[str] | None = None,
        folder: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, in its folder and on its core: each host has one, while there are enough."""
        cores = sorted(_cores())
        pinned = ["taskset", "-c", str(cores[host % len(cores)] if core is None else core)]
        enter = [
            "ip",
            "netns",
            "exec",
            self._namespace(host),
            "unshare",
            "--uts",
            "sh",
            "-c",
            ENTER,
        ]
        process = subprocess.Popen(
            [*enter, self.name(host), str(self._names), *pinned, *command],
            cwd=folder or self.folder(host),
            env={**self.variables(host), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        self._processes.append(process)
        return process

    def variables(self, host: int) -> dict[str, str]:
        """The environment of a host's processes: this code, one thread, and a cache that no other host has."""
        own = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "LAPCLIP_CACHE": str(self.folder(host) / "cache"),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | own

    def processes(self, host: int) -> list[int]:
        """The numbers of all processes on a host."""
        return [
            int(number) for number in _run("ip", "netns", "pids", self._namespace(host)).split()
        ]

    def kill(self, host: int, *, silently: bool = False) -> None:
        """End every process of a host at once. The system still closes their connections, unless the host goes
        silently, as one whose power fails: then its link stays down."""
        if silently:
            self.take_down(host)
        while found := self.processes(
            host
        ):  # again, because one may have started another meanwhile
            for number in found:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.01)

    # Lines of torchrun

    def torchrun(
        self,
        host: int,
        arguments: Iterable[str],
        *,
        count: int | None = None,
        python: str = sys.executable,
    ) -> list[str]:
        """What is typed on a host so that it and the others, `count` in all, run a script, or `-m` and a module."""
        where = [f"--node-rank={host}", f"--master-addr={self.address(0)}", f"--master-port={PORT}"]
        return [
            python,
            *TORCHRUN,
            f"--nnodes={count or self.count}",
            "--nproc-per-node=1",
            *where,
            *arguments,
        ]

    def elastic_torchrun(self, host: int, arguments: Iterable[str], name: str) -> list[str]:
        """The same for hosts that come and go: one is enough, and the first keeps the rendezvous. Wants `ELASTIC`."""
        settings = f"is_host={int(host == 0)},last_call_timeout=3"  # how long those that are there wait for others
        meeting = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.address(0)}:{PORT}",
            f"--rdzv-conf={settings}",
        ]
        own = [f"--local-addr={self.address(host)}", f"--rdzv-id={name}", "--max-restarts=100"]
        return [
            sys.executable,
            *TORCHRUN,
            f"--nnodes=1:{self.count}",
            "--nproc-per-node=1",
            *meeting,
            *own,
            *arguments,
        ]


def _cores() -> set[int]:
    """All cores of the machine, also where this process is tied to one of them."""
    return set(range(os.cpu_count() or 1))


def _remove_abandoned() -> None:
    """Take apart the hosts of processes that were killed."""
    for line in _run("ip", "netns", "list").splitlines():
        space = line.split()[0]
        owner = re.match(r"lapclip-(\d+)-", space)
        if owner and not Path("/proc", owner[1]).exists():
            for number in _run("ip", "netns", "pids", space).split():
                with suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
            with suppress(OSError):  # another process may have been quicker
                _run("ip", "netns", "delete", space)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(
            f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}"
        )
    return done.stdout
