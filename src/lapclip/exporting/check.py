"""What an export lost and gained: its embeddings, its recall on held-out pairs, its speed, beside the model's own; and
what that says of the exports in a run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.data.dataset import Pairs
from lapclip.embedder import Encoder, read_description
from lapclip.errors import LapclipError
from lapclip.evaluation.ranks import ranks
from lapclip.evaluation.retrieval import retrieval
from lapclip.exporting.export_folder import EXPORTED
from lapclip.machine.other_programs import describe_busy_cores
from lapclip.measure.timing import Timer
from lapclip.progress import Progress, Status
from lapclip.runs.folder import Run
from lapclip.weights import is_exported

LEAST_COSINE, MOST_LOST = 0.995, 0.01
"""An export passes with a mean cosine of at least this to the model's own embeddings, and R@1 at most a point lower, or
one caption where that is more."""
BATCHES = (1, 32)
ROUNDS, SECONDS = 30, 6.0
"""Interleaved repeats of a timing at most, and after how many seconds they end."""
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Embedded:
    """Images, captions and each caption's image, as one encoder sees them."""

    images: np.ndarray
    texts: np.ndarray
    owner: np.ndarray

    @classmethod
    def by(cls, encoder: Encoder, pairs: Pairs, progress: Progress | None = None) -> Embedded:
        return cls(*encoder.encode_pairs(pairs, progress))

    def recall(self) -> tuple[float, list[float]]:
        """Text-to-image R@1 with its 95 % interval."""
        found = retrieval(self.images, self.texts, self.owner)
        return found["t2i_r1"], found["intervals"]["t2i_r1"]


def recall_lost(before: Embedded, after: Embedded) -> tuple[float, float]:
    """How much lower text-to-image R@1 is, and how much of that chance explains.

    Of captions whose answer changes, some get better and some worse. With n of them, twice the root of n is what a
    model that is no worse loses at most, 39 times of 40.
    """
    was, now = (ranks(found.images, found.texts, found.owner)[0] == 1 for found in (before, after))
    return float((was.sum() - now.sum()) / len(was)), float(
        2 * (was != now).sum() ** 0.5 / len(was)
    )


def cosines(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """How close rows are to what they were: 1 is the same direction."""
    rows = (before.astype(np.float64) * after).sum(axis=1)
    rows /= np.linalg.norm(before.astype(np.float64), axis=1) * np.linalg.norm(
        after.astype(np.float64), axis=1
    )
    return {"mean": float(rows.mean()), "worst": float(rows.min())}


def compare(before: Embedded, after: Embedded) -> dict[str, Any]:
    """Cosine of each tower and recall, and whether both are good enough."""
    recall_before, interval_before = before.recall()
    recall_after, interval_after = after.recall()
    close = {
        "image": cosines(before.images, after.images),
        "text": cosines(before.texts, after.texts),
    }
    one_caption = 1 / max(1, len(before.texts))  # among a few, one answer is more than a point
    passed = recall_after >= recall_before - max(MOST_LOST, one_caption) - 1e-9 and all(
        found["mean"] >= LEAST_COSINE for found in close.values()
    )
    return {
        "recall_before": recall_before,
        "recall_after": recall_after,
        "intervals": {"recall_before": interval_before, "recall_after": interval_after},
        "candidates": len(before.images),
        "cosine": close,
        "passed": passed,
    }


def compare_and_time(
    embedder: Encoder,
    exported: Encoder,
    before: Embedded,
    after: Embedded,
    pairs: Pairs,
    status: Status,
) -> dict[str, Any]:
    """The whole check: closeness and recall of what was written, and its speed beside the model's own."""
    busy = describe_busy_cores()
    timed = latencies(embedder, exported, typical_inputs(embedder, pairs), status)
    return {
        **compare(before, after),
        "latency": timed,
        "busy": busy,
        "ms_before": both_towers(timed, "ms_before"),
        "ms_after": both_towers(timed, "ms_after"),
    }


def without_running(before: Embedded) -> dict[str, Any]:
    """What stands in the place of the check where the export cannot run on this machine."""
    recall, interval = before.recall()
    return {
        "candidates": len(before.images),
        "recall_before": recall,
        "recall_after": None,
        "intervals": {"recall_before": interval, "recall_after": None},
        "cosine": None,
        "passed": None,
        "latency": [],
        "ms_before": None,
        "ms_after": None,
    }


def latencies(
    before: Encoder, after: Encoder, inputs: dict[str, np.ndarray], status: Status
) -> list[dict[str, Any]]:
    """Milliseconds of each tower at each batch size, of both encoders in turns: medians."""
    found = []
    for tower, given in inputs.items():
        for batch in BATCHES:
            status(f"timing the {tower} tower, {batch} at a time")
            repeated = np.resize(given, (batch, *given.shape[1:]))
            runs = {
                name: lambda encoder=encoder, rows=repeated, tower=tower: run_tower(
                    encoder, tower, rows
                )
                for name, encoder in (("before", before), ("after", after))
            }
            timer = Timer(
                rounds=ROUNDS, min_rounds=LEAST_ROUNDS, max_seconds=SECONDS, warm_up_rounds=3
            )
            timings = timer.time_in_turns(runs)
            seconds_before, seconds_after = timings["before"].median, timings["after"].median
            found.append({
                "tower": tower,
                "batch": batch,
                "ms_before": 1000 * seconds_before,
                "ms_after": 1000 * seconds_after,
                "ratio": seconds_before / seconds_after,
            })  # fmt: skip
    return found


def run_tower(encoder: Encoder, tower: str, rows: np.ndarray) -> np.ndarray:
    """One batch through one tower."""
    return encoder.embed_pixels(rows) if tower == "image" else encoder.embed_tokens(rows)


def typical_inputs(encoder: Encoder, pairs: Pairs) -> dict[str, np.ndarray]:
    """Some images and captions to time with; the captions padded to the length of the longest of them."""
    some = slice(0, max(BATCHES))
    captions = [captions[0] for captions in pairs.captions[some] if captions] or ["an image"]
    return {
        "image": np.array(pairs.pixels[some]),
        "text": encoder.tokenizer.batch(captions, encoder.context),
    }


def both_towers(timed: list[dict[str, Any]], name: str, batch: int = 1) -> float:
    """Milliseconds of one image and one caption."""
    return sum(row[name] for row in timed if row["batch"] == batch)


@dataclass(frozen=True)
class FoundExport:
    """A folder that `lapclip export` wrote, and what its lapclip.json says."""

    folder: Path
    about: dict[str, Any]

    def is_of(self, fingerprint: str) -> bool:
        """Return whether it was made from this model."""
        return self.about.get("made_from") == fingerprint


def find_export(run: Run, to: str) -> FoundExport | None:
    """The export of a run in this format, if there is one that can be read."""
    folder = run.path / EXPORTED / to
    if not is_exported(folder):
        return None
    try:
        return FoundExport(folder, read_description(folder))
    except LapclipError:
        return None
