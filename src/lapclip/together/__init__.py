"""Two commands at home: one computer trains and invites, others join it. What both ends, and the processes that torch's
elastic agent starts for them, know of each other. No torch.

The host, which has the data and the run's folder, serves an invitation; a guest takes the data from there. Then both
start torch's elastic agent, and the agents start the processes that train.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lapclip.config import Config
from lapclip.errors import LostRank, RunError
from lapclip.machine.torchrun import under_torchrun
from lapclip.paths import write_atomic
from lapclip.suggest import command
from lapclip.text import printable

PORT = 29400
"""Where a host is joined, unless it is told otherwise. Its rendezvous has the port after that."""
STATUS = "LAPCLIP_STATUS_FILE"
"""Names the file in which a process says to its agent how it ended."""
AGENT = "LAPCLIP_AGENT"
"""The number of the agent's process, for those that it starts."""
MACHINES = "LAPCLIP_MACHINES"
"""How many computers the host was told to train with, for the processes that train."""
ADDRESS = "LAPCLIP_ADDRESS"
"""What the host was told to be joined at, for the processes that train; not there where it chose by itself."""
AGREED = "LAPCLIP_AGREED"
"""What a guest agreed to, for the process that trains there."""
LOST = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
"""What torch raises where another computer is gone."""


def quiet_torch() -> None:
    """Keep torch's warnings about names and closed connections off the terminal. Before it is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def is_restarted(error: BaseException | None) -> bool:
    """Whether an agent started this process, and starts it again after this error: another rank was lost."""
    return STATUS in os.environ and (isinstance(error, LostRank) or type(error).__name__ in LOST)


def tell_agent(status: int, error: BaseException | None = None) -> None:
    """Leave the exit status for the agent that started this process, if one did. Where there is none, the agent starts
    the process again."""
    path = os.environ.get(STATUS)
    if path and not is_restarted(error):
        write_atomic(Path(path), str(status))


def end_with_agent() -> None:
    """End this process when the agent that started it is gone, as if it had been killed, too: left alone it would go on
    with a run that another process takes up again."""
    if under_torchrun():
        os.environ.setdefault(AGENT, str(os.getppid()))
    agent = os.environ.get(AGENT)

    def watch() -> None:
        while os.getppid() == int(agent or 0):
            time.sleep(1.0)
        os._exit(1)

    if agent and os.name != "nt":  # Windows does not tell
        threading.Thread(target=watch, name="lapclip-agent", daemon=True).start()


def name_here(name: str) -> str:
    """What a file of the cache is called here. A guest has some from its host, for which nobody here vouches: they have
    names of their own, so that neither the user's own runs nor those of other hosts take them."""
    agreed = Agreement.of_this_process()
    stem, dot, ending = name.rpartition(".")
    return f"{stem}-of-{agreed.host}{dot}{ending}" if agreed else name


def machines_wanted() -> int:
    """With how many computers the host was told to train; 0 where no host invited others."""
    wanted = os.environ.get(MACHINES, "")
    return int(wanted) if wanted.isdigit() else 0


def invited_at() -> str:
    """The address that the host was told to be joined at; empty where it chose by itself."""
    return os.environ.get(ADDRESS, "")


def resume_together(run: str | None, machines: int | None = None) -> str:
    """The command that goes on with a run, by default the newest, as it was trained: with as many computers, or
    alone."""
    machines = machines_wanted() if machines is None else machines
    return command(
        "resume", *([run] if run else []), *(["--machines", machines] if machines else [])
    )


@dataclass(frozen=True)
class Agreement:
    """What a guest agreed to when it joined. The settings of a run reach it once more by torch's engine, which knows no
    authentication, so they are compared with this."""

    host: str
    """A digest of the host's key, which tells it from others."""
    fingerprint: str
    """Of the data."""
    source: str
    """Where the data is on this computer, as the user here named it; empty where it was brought over or is drawn."""
    image_from: str
    text_from: str
    start: str
    teacher: str

    @classmethod
    def on(cls, config: Config, host: str, fingerprint: str, source: str = "") -> Agreement:
        """The agreement to a run with these settings on this data."""
        model, train = config.model, config.train
        return cls(
            host, fingerprint, source, model.image_from, model.text_from, train.start, train.teacher
        )

    @classmethod
    def of_this_process(cls) -> Agreement | None:
        """What the guest that started this process agreed to; None where no guest did."""
        text = os.environ.get(AGREED)
        return cls(**json.loads(text)) if text else None

    def variables(self) -> dict[str, str]:
        """The environment that tells it to a process."""
        return {AGREED: json.dumps(asdict(self))}

    def check(self, config: Config, fingerprint: Any) -> None:
        """Refuse a run that is another one than was agreed to, in what a guest would have to trust."""
        found = asdict(Agreement.on(config, self.host, str(fingerprint), self.source))
        for name, agreed in asdict(self).items():
            if found[name] != agreed:
                raise RunError(
                    f"The run is not the one that was joined: its {name} is {printable(found[name]) or 'empty'}, and "
                    f"{printable(agreed) or 'empty'} was agreed to.",
                    hint="lapclip join again, and see what it shows",
                )
