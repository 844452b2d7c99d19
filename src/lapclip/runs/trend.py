"""Whether validation still improves: the one rule behind the doctor, the watch page, the report and the terminal.

A run keeps the model with the best deciding score: the mean of the six held-out recalls, or zero-shot accuracy where
images have classes. The trend compares this evaluation with the ones after it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lapclip.runs.curves import median
from lapclip.runs.summary import Summary, batch_accuracy
from lapclip.text import number

RECALLS = tuple(f"{way}_r{rank}" for way in ("t2i", "i2t") for rank in (1, 5, 10))
MIN_LATER_EVALUATIONS = 3  # one or two that are worse than the best may be chance
LEAST_FALL = 0.05  # share of the best score; scores of a run that has leveled off vary by less
LEAST_RECALL_FALL = (
    0.15  # the same for R@1 alone, which varies more, once the training pairs are known by heart
)
KNOWN_BY_HEART = 0.95  # accuracy in training batches
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
    recalls: list[float | None]
    """Text to image R@1 of the model that is kept, and of the evaluations after it."""
    training_accuracy: float
    """Median share of right answers in the latest training batches."""
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
        if self.loss_then is None or self.loss_now is None or self.loss_now >= self.loss_then:
            return Trend.LEVEL
        if max(self.later_scores[-MIN_LATER_EVALUATIONS:]) < (1 - LEAST_FALL) * self.kept_score:
            return Trend.FALLING
        latest = [recall or 0.0 for recall in self.recalls[-MIN_LATER_EVALUATIONS:]]
        recall_fell = max(latest) < (1 - LEAST_RECALL_FALL) * (self.recalls[0] or 0.0)
        return (
            Trend.FALLING
            if recall_fell and self.training_accuracy >= KNOWN_BY_HEART
            else Trend.LEVEL
        )


def deciding_score(evaluation: dict[str, Any]) -> float | None:
    """Return the score that decides which model is kept. None if the evaluation lacks it."""
    if "zeroshot_top1" in evaluation:
        return number(evaluation["zeroshot_top1"])
    recalls = [number(evaluation.get(name)) for name in RECALLS]
    known = [recall for recall in recalls if recall is not None]
    return statistics.fmean(known) if known else None


def is_worse(scores: dict[str, Any], start: dict[str, Any]) -> bool:
    """Return whether the scores of a model are below those of the model that it started from."""
    score, start_score = deciding_score(scores), deciding_score(start)
    return score is not None and start_score is not None and score < start_score


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
    recalls = [number(kept["evaluation"].get("t2i_r1"))]
    for event in summary.evaluations:
        score = deciding_score(event["evaluation"])
        if score is None:
            continue
        scores.append(score)
        if event["step"] > kept["step"]:
            later_scores.append(score)
            recalls.append(number(event["evaluation"].get("t2i_r1")))
    accuracy = median(batch_accuracy(event) for event in summary.steps[-LOSS_WINDOW_STEPS:])
    loss_then, loss_now = median_loss(summary, kept["step"]), median_loss(summary, summary.step)
    return Validation(kept, scores, later_scores, recalls, accuracy or 0.0, loss_then, loss_now)


def trend_text(found: Validation, *, is_over: bool) -> str:
    """Return the trend in one sentence, for the page and the report. Empty if nothing can be said yet."""
    step = f"step {found.kept['step']:,}"
    if found.trend is Trend.IMPROVING:
        more = " More time may help." if is_over else ""
        return f"Held-out scores were still rising at {step}.{more}"
    if found.trend is Trend.LEVEL:
        return f"Held-out scores have not risen since {step}: more time would not help."
    if found.trend is Trend.FALLING:
        return f"Held-out scores have fallen since {step} while the training loss fell: more time would not help."
    return ""


def median_loss(summary: Summary, step: int) -> float | None:
    """Return the median training loss of the latest steps up to this one."""
    events = [event for event in summary.steps if event["step"] <= step]
    window = max(LOSS_WINDOW_STEPS, round(LOSS_WINDOW_SHARE * len(events)))
    return median(number(event.get("loss")) for event in events[-window:])
