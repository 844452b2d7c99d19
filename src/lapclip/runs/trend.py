"""Whether validation still improves: the one rule behind the doctor, the watch page, the report and the terminal.

A run keeps the model with the best deciding score: the mean of the six held-out recalls, or zero-shot accuracy where
images have classes. The trend compares this evaluation with the ones after it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lapclip.runs.summary import Summary
from lapclip.text import number

RECALLS = tuple(f"{way}_r{rank}" for way in ("t2i", "i2t") for rank in (1, 5, 10))
MIN_LATER_EVALUATIONS = 3  # one or two that are worse than the best may be chance
LEAST_FALL = 0.05  # share of the best score; scores of a run that has leveled off vary by less
LOSS_WINDOW_STEPS, LOSS_WINDOW_SHARE = 20, 0.1


class Trend(Enum):
    """Direction of the deciding score since the model that is kept."""

    UNKNOWN = "too few evaluations"
    IMPROVING = "the latest evaluation is the best"
    LEVEL = f"the last {MIN_LATER_EVALUATIONS} evaluations or more are not better than the best"
    FALLING = "they are clearly worse, and the training loss fell"


@dataclass(frozen=True)
class Validation:
    """Held-out scores over a run, and the evaluation whose model is kept."""

    kept: dict[str, Any]
    """The `evaluation` event of the model that is kept."""
    scores: list[float]
    """Deciding scores, in order of steps."""
    later_scores: list[float]
    """Those after the model that is kept."""
    loss_then: float | None
    """Median training loss of the steps up to the model that is kept."""
    loss_now: float | None

    @property
    def kept_score(self) -> float:
        return deciding_score(self.kept["evaluation"]) or 0.0

    @property
    def trend(self) -> Trend:
        if len(self.scores) < 2:
            return Trend.UNKNOWN
        if not self.later_scores:
            return Trend.IMPROVING
        if len(self.later_scores) < MIN_LATER_EVALUATIONS:
            return Trend.UNKNOWN
        highest = max(self.later_scores[-MIN_LATER_EVALUATIONS:])
        if self.loss_then is None or self.loss_now is None or self.loss_now >= self.loss_then:
            return Trend.LEVEL
        return Trend.FALLING if highest < (1 - LEAST_FALL) * self.kept_score else Trend.LEVEL


def deciding_score(evaluation: dict[str, Any]) -> float | None:
    """Return the score that decides which model is kept. None if the evaluation lacks it."""
    if "zeroshot_top1" in evaluation:
        return number(evaluation["zeroshot_top1"])
    recalls = [value for name in RECALLS if (value := number(evaluation.get(name))) is not None]
    return statistics.fmean(recalls) if recalls else None


def score_name(evaluation: dict[str, Any]) -> str:
    """Return what the deciding score is called."""
    return "zero-shot accuracy" if "zeroshot_top1" in evaluation else "mean recall"


def kept_evaluation(summary: Summary) -> dict[str, Any] | None:
    """Return the evaluation event whose model is kept. None before the first evaluation."""
    marked = [event for event in summary.evaluations if event.get("best")]
    return marked[-1] if marked else None


def validation(summary: Summary) -> Validation | None:
    """Return the held-out scores of a run. None before the first evaluation."""
    kept = kept_evaluation(summary)
    if kept is None or deciding_score(kept["evaluation"]) is None:
        return None
    scores, later_scores = [], []
    for event in summary.evaluations:
        score = deciding_score(event["evaluation"])
        if score is None:
            continue
        scores.append(score)
        if event["step"] > kept["step"]:
            later_scores.append(score)
    loss_then, loss_now = median_loss(summary, kept["step"]), median_loss(summary, summary.step)
    return Validation(kept, scores, later_scores, loss_then, loss_now)


def trend_text(found: Validation, *, is_over: bool) -> str:
    """Return the trend in one sentence, for the page and the report. Empty if nothing can be said yet."""
    step = f"step {found.kept['step']:,}"
    if found.trend is Trend.IMPROVING:
        more = " More time may help." if is_over else ""
        return f"Held-out scores were still rising at {step}.{more}"
    if found.trend is Trend.LEVEL:
        return f"Held-out scores have not risen since {step}: more time would not help."
    if found.trend is Trend.FALLING:
        return (
            f"Held-out scores have fallen since {step} while the training loss fell: the model memorizes its "
            f"training pairs. The model of {step} is kept; more time would not help."
        )
    return ""


def median_loss(summary: Summary, step: int) -> float | None:
    """Return the median training loss of the latest steps up to this one."""
    events = [event for event in summary.steps if event["step"] <= step]
    window = max(LOSS_WINDOW_STEPS, round(LOSS_WINDOW_SHARE * len(events)))
    losses = [value for event in events[-window:] if (value := number(event.get("loss"))) is not None]
    return statistics.median(losses) if losses else None
