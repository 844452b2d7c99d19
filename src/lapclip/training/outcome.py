"""What `train` and `resume` return."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainOutcome:
    """A run at its end, or where it was stopped."""

    run: str
    """Its folder."""
    state: str
    """finished or stopped."""
    seconds: float
    """Wall clock of this process, with set-up."""
    training_seconds: float
    """Without set-up, over all processes that worked on the run."""
    steps: int
    pairs_per_second: float
    peak_memory_bytes: int
    devices: dict[str, str]
    """Device of each tower."""
    data: str
    best_step: int
    """Step of the model that is kept, which `evaluation` scores."""
    early: str
    """Reason for ending before the last step. Empty if it did not."""
    places: list[dict[str, Any]]
    """Devices of the towers from each step on that changed them."""
    evaluation: dict[str, Any] | None
    start_evaluation: dict[str, Any] | None = None
    """Scores of the trained model that the run started from. None if there was none."""
    short_questions: dict[str, Any] | None = None
    """Scores of words and phrases as queries. None if there are too few."""
    signal: int | None = None
    """Signal that asked the run to end, perhaps when nothing was left to stop."""

    @property
    def exit_status(self) -> int:
        """0, or 128 and the signal that ended the run."""
        if self.signal and self.state == "stopped":
            return 128 + self.signal
        return 0

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        values = asdict(self)
        del values["signal"]
        return values
