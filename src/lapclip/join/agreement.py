"""What a guest agreed to when it joined, for the process that trains there. No torch.

Settings reach that process a second time, over connections that know no key. So they are compared
with what the host signed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from lapclip.config import Config
from lapclip.errors import RunError
from lapclip.suggest import command
from lapclip.text import printable

# Variables of the processes that an agent starts.
AGREEMENT = "LAPCLIP_AGREEMENT"
MACHINES = "LAPCLIP_MACHINES"


@dataclass(frozen=True)
class Agreement:
    """Parts of a run that a guest must trust."""

    fingerprint: str
    """Fingerprint of the data."""
    bundle: str
    """Digest of the copied data. Empty for images that are drawn."""
    image_from: str
    text_from: str
    start: str
    teacher: str

    @classmethod
    def on(cls, config: Config, fingerprint: str, bundle: str) -> Agreement:
        """Return the agreement to a run with these settings and this data."""
        model, train = config.model, config.train
        return cls(
            fingerprint, bundle, model.image_from, model.text_from, train.start, train.teacher
        )

    @classmethod
    def of_this_process(cls) -> Agreement | None:
        """Return what the guest that started this process agreed to. None without a guest."""
        text = os.environ.get(AGREEMENT)
        return cls(**json.loads(text)) if text else None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def check(self, config: Config, fingerprint: str) -> None:
        """Refuse a run that differs from the one that was joined."""
        run = asdict(Agreement.on(config, fingerprint, self.bundle))
        for name, agreed in asdict(self).items():
            if run[name] != agreed:
                raise RunError(
                    f"This is not the run that was joined: its {name} is {printable(run[name])!r}, "
                    f"not {printable(agreed)!r}.",
                    hint="lapclip join again, and compare what it shows",
                )


def invited_machines() -> int:
    """Return how many computers the host of this process trains with. 0 without a host."""
    return int(os.environ.get(MACHINES, "0"))


def resume_words(run: str) -> str:
    """Return the command that resumes a run with as many computers as this process trains with."""
    machines = invited_machines()
    words = ["--machines", machines] if machines else []
    return command("resume", run, *words)


def name_here(name: str) -> str:
    """Return the name of a cache file on this computer.

    Files that a host sent have other names on a guest, so that its own runs never use them.
    """
    agreement = Agreement.of_this_process()
    if agreement is None:
        return name
    stem, dot, ending = name.rpartition(".")
    return f"{stem}-received-{agreement.bundle[:16]}{dot}{ending}"
