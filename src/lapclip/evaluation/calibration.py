"""What held-out pairs say of a model's scores: how much is taken from them for hubness, from which score on an image
fits, and whether they can tell that nothing fits. `lapclip eval` measures it and keeps it with the model, with the
vectors of the question bank; search needs nothing else, and uses of it what was measured to help.

Shapes: N images, E embedding, M captions, Q questions, B texts of a bank, K kinds of question.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lapclip.embedder import Encoder
from lapclip.errors import LapclipError
from lapclip.evaluation import ENOUGH_TO_TELL, FIT_WORDS, QUESTIONS
from lapclip.evaluation.hubness import (
    KINDS,
    SHARES,
    QuestionBank,
    choose_for_captions,
    choose_for_questions,
    closeness,
    count_words,
)
from lapclip.evaluation.intervals import bootstrap_interval, percentiles, resamples
from lapclip.evaluation.short_questions import ShortQuestions, average_precisions
from lapclip.paths import cache_folder, check_plain, check_size, digest_of_bytes, parse_json, write_atomic
from lapclip.progress import Progress
from lapclip.seeding import generator
from lapclip.which_model import WhichModel

FORMAT = 1
KEPT = "calibration-{}.safetensors"
"""What was measured of a model that is no run, by its fingerprint."""
FALSE_ALARMS = 0.05
"""Share of questions with an answer for which it is said that there is none."""
FIRST = 5
"""Answers that are looked at."""
RIGHT_AT_LEAST = {"fits_well": 0.8, "fits": 0.5, "may_fit": 0.2}
"""How many of the first answers with such a score have to be right for a word to hold."""
LARGEST = 100_000_000
"""Bytes of the file that is kept; a bank of usual size has some ten million."""
REFERENCE = 1000
"""Held-out images that are kept, to compare a question's best score with its scores on these."""
FEWEST = 20
"""Questions of a kind below which nothing is measured."""
LIBRARY = 10_000
"""Images that these are asked about at most: all scores are held at once."""
MOST = 1000
"""Questions of each kind that the words and the verdict are measured on."""


@dataclass(frozen=True)
class Calibration:
    """What was measured of a model's scores."""

    model: str
    """The fingerprint of the model."""
    vectors: dict[str, np.ndarray]
    """Of the question bank, by kind, and of some held-out images, as `images`: float16."""
    facts: dict[str, Any]
    """As --json prints it."""

    @cached_property
    def digest(self) -> str | None:
        """Names the question bank; None where nothing is taken for hubness."""
        if not any(self.share(kind) for kind in KINDS):
            return None
        return digest_of_bytes(b"".join(self.vectors[kind].tobytes() for kind in KINDS))[:16]

    def kind(self, text: str) -> str:
        """Whether a question is short or like a whole caption: by its number of words."""
        return "short" if count_words(text) < int(self.facts["hubness"]["short_below"]) else "whole"

    def share(self, kind: str) -> float:
        """How much of an image's closeness to questions in general is taken from its scores."""
        found = self.facts["hubness"].get(kind) or {}
        return float(found["share"]) if found.get("used") else 0.0

    def less(self, kind: str, close_NK: np.ndarray | None) -> np.ndarray | None:
        """What is taken from the scores of images; None where nothing is. Of what is usual nothing is taken, so that
        scores stay about as high as they were; nor is it where it is not known yet."""
        share = self.share(kind)
        if not share or close_NK is None:
            return None
        usual = np.float32(self.facts["hubness"][kind]["usual"])
        return np.float32(share) * np.nan_to_num(close_NK[:, KINDS.index(kind)] - usual)

    def fit(self, kind: str, score: float) -> str | None:
        """How well an image of such a score fits; None where that was not measured."""
        found = self.facts["fits"].get(kind)
        return fit_of(score, found) if found else None

    def worth(self) -> tuple[bool, int]:
        """What is kept is what has more of it."""
        return bool(self.facts.get("own_val")), int(self.facts["hubness"]["whole"].get("questions", 0))

    def gained(self, kind: str) -> str | None:
        """What the correction for hubness gained on held-out pairs; None where it is not used."""
        if not self.share(kind):
            return None
        found = self.facts["hubness"][kind]
        if kind == "whole":
            return (
                "Images that fit every question are moved down: a caption finds its own first in "
                f"{found['t2i_r1_with']:.1%} of cases with that, in {found['t2i_r1']:.1%} without."
            )
        return (
            "Images that fit every short question are moved down: the mean average precision of single words is "
            f"{found['map_with']:.3f} with that and {found['map']:.3f} without."
        )

    def standing(self, kind: str, question_E: np.ndarray, best: float, images: int) -> float:
        """How far the best of so many scores stands above what unrelated images would give."""
        scores_R = self.vectors["images"].astype(np.float32) @ question_E
        less_R = self.less(kind, self._close_RK)
        return standing(best, images, scores_R if less_R is None else scores_R - less_R)

    @cached_property
    def _close_RK(self) -> np.ndarray:
        return closeness(self.vectors["images"], self.vectors)

    def verdict(self, kind: str, standing: float | None) -> dict[str, Any]:
        """Whether probably nothing fits, as --json prints it: `nothing` is None where the model cannot tell, and `why`
        says so."""
        found = self.facts["verdict"].get(kind)
        if not found:
            return {"nothing": None, "why": f"that was not measured for {QUESTIONS[kind]}"}
        if found["auroc_low"] < ENOUGH_TO_TELL:
            told = f"its best score tells what is there from what is not with an AUROC of {found['auroc']:.2f}"
            surely = f"at least {found['auroc_low']:.2f} for sure"
            return {"nothing": None, "why": f"{told} ({surely}) for {QUESTIONS[kind]}; it takes {ENOUGH_TO_TELL}"}
        return {"nothing": standing is not None and standing < found["threshold"], "why": None}


def standing(best: float, images: int, unrelated_R: np.ndarray) -> float:
    """How far the best of so many scores is above what the best of as many unrelated images would be, in standard
    deviations of their scores."""
    expected = NormalDist().inv_cdf(0.5 ** (1 / max(images, 1)))
    return float((best - unrelated_R.mean()) / max(float(unrelated_R.std()), 1e-9) - expected)


def calibration_path(which: WhichModel, fingerprint: str) -> Path:
    """Where it is kept: with the run whose model it is, else in lapclip's cache by the model's fingerprint."""
    return which.run.calibration if which.run else cache_folder() / KEPT.format(fingerprint)


def calibration_of(which: WhichModel, encoder: Encoder) -> Calibration | None:
    """What was measured of a model, else of the one that it was exported from; None where nothing was."""
    run, paths = which.made_by, list[Path]()
    if run and run.calibration.exists():
        paths.append(run.calibration)
    elif not any(cache_folder().glob(KEPT.format("*"))):
        return None  # a fingerprint takes all weights to make
    own = encoder.fingerprint()
    names = {own, getattr(encoder, "made_from", own)}
    paths += [path for name in sorted(names) if (path := cache_folder() / KEPT.format(name)).exists()]
    found = [one for path in paths if (one := read_calibration(path, encoder.embedding)) and one.model in names]
    return min(found, key=lambda one: one.model != own, default=None)


def keep_calibration(found: Calibration, path: Path) -> Calibration | None:
    """Keep it for search, unless what was kept before of the same model is worth more: then that is returned. A run's
    own val split is worth more than other images, and of other images more captions are. A disk that is full, or
    cannot be written to, costs the caller nothing else."""
    before = read_calibration(path, found.vectors["images"].shape[1])
    if before and before.model == found.model and before.worth() > found.worth():
        return before
    metadata = {"lapclip": json.dumps({"model": found.model, **found.facts})}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save(found.vectors, metadata))
    return None


def read_calibration(path: Path, width: int) -> Calibration | None:
    """What was kept there for vectors of so many numbers; None where that cannot be read."""
    try:
        check_plain(path)
        check_size(path.stat().st_size, LARGEST)
        with safe_open(path, "np") as file:
            facts = parse_json((file.metadata() or {})["lapclip"])
            vectors = {name: file.get_tensor(name) for name in (*KINDS, "images")}
        found = Calibration(str(facts.pop("model")), vectors, facts)
        if any(part.dtype != np.float16 or part.shape[1:] != (width,) for part in vectors.values()):
            return None
        finite = _is_sound(facts) and all(np.isfinite(part).all() for part in vectors.values())
        if not finite or not len(vectors["images"]):
            return None
        for kind in KINDS:  # what is not as it should be is found here, not in the middle of an answer
            if not 0 <= found.share(kind) <= 1 or (found.share(kind) and not len(vectors[kind])):
                return None
            found.less(kind, np.zeros((1, len(KINDS)), np.float32))
            found.fit(kind, 0.0)
            found.verdict(kind, 0.0)
            found.gained(kind)
        found.kind("")
        found.worth()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, SafetensorError, LapclipError):
        return None
    return found


def _is_sound(facts: Any) -> bool:
    """Whether all numbers are numbers, however deep: JSON as Python reads it has others."""
    if isinstance(facts, dict | list):
        return all(_is_sound(each) for each in (facts.values() if isinstance(facts, dict) else facts))
    return not isinstance(facts, int | float) or math.isfinite(facts)  # of integers beyond all floats it raises


def calibrate(
    encoder: Encoder,
    bank: QuestionBank,
    image_NE: np.ndarray,
    text_ME: np.ndarray,
    image_M: np.ndarray,
    asked_QE: np.ndarray | None = None,
    questions: ShortQuestions | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measure it on held-out pairs, image_M being each caption's image, and on short questions about them."""
    every = encoder.encode_text([*bank.captions, *bank.phrases], progress).astype(np.float16)
    vectors = {"whole": every[: len(bank.captions)], "short": every[len(bank.captions) :]}
    image_NE = image_NE.astype(np.float16).astype(np.float32)  # as an index has them
    close_NK = closeness(image_NE, vectors)
    hubness: dict[str, Any] = {
        "bank": {"from": bank.origin, "captions": len(bank.captions), "phrases": len(bank.phrases)},
        "short_below": bank.short_below,
        "whole": choose_for_captions(image_NE, text_ME, image_M, close_NK[:, KINDS.index("whole")]),
    }
    if asked_QE is not None and questions:
        scores_QN, close_N = asked_QE @ image_NE.T, close_NK[:, KINDS.index("short")]
        precision_SQ = np.stack([average_precisions(scores_QN - s * close_N, questions.right_QN) for s in SHARES])
        hubness["short"] = choose_for_questions(precision_SQ, questions.words)
    for column, kind in enumerate(KINDS):
        if kind in hubness:
            hubness[kind]["usual"] = float(close_NK[:, column].mean())
    facts = {"format": FORMAT, "hubness": hubness, "fits": {}, "verdict": {}}
    order = generator(0, "library and unrelated images").permutation(len(image_NE))
    vectors["images"] = image_NE[order[:REFERENCE]].astype(np.float16)
    found = Calibration(encoder.fingerprint(), vectors, facts)
    library, unrelated = order[: len(order) // 2][:LIBRARY], order[len(order) // 2 :][:REFERENCE]
    for kind, question_QE, right_QN in _questions(text_ME, image_M, asked_QE, questions, library):
        less_N = found.less(kind, close_NK)
        scores_QN = question_QE @ image_NE.T - (0 if less_N is None else less_N)
        facts["fits"][kind] = measure_fits(scores_QN[:, library], right_QN)
        facts["verdict"][kind] = measure_verdict(scores_QN[:, library], scores_QN[:, unrelated], right_QN)
    return found


def _questions(
    text_ME: np.ndarray,
    image_M: np.ndarray,
    asked_QE: np.ndarray | None,
    questions: ShortQuestions | None,
    library: np.ndarray,
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Questions of each kind about the images of a library, and which of those are right: enough of them to measure."""
    whole = np.flatnonzero(np.isin(image_M, library))
    whole = whole[generator(0, "questions").permutation(len(whole))[:MOST]]
    if len(whole) >= FEWEST:
        yield "whole", text_ME[whole], image_M[whole][:, None] == library[None]
    if asked_QE is None or questions is None:
        return
    right_QN = questions.right_QN[:, library]
    short = np.flatnonzero(right_QN.any(axis=1) & ~right_QN.all(axis=1))[:MOST]
    if len(short) >= FEWEST:
        yield "short", asked_QE[short], right_QN[short]


def measure_fits(scores_QN: np.ndarray, right_QN: np.ndarray) -> dict[str, Any]:
    """The scores from which on an image fits, and fits well, among the first five answers to a question; and how many
    of these are right, where each half of the questions is judged by the scores that the other half sets."""
    first_QA = np.argpartition(-scores_QN, min(FIRST, scores_QN.shape[1]) - 1, axis=1)[:, :FIRST]
    scores_QA, right_QA = np.take_along_axis(scores_QN, first_QA, 1), np.take_along_axis(right_QN, first_QA, 1)
    half_Q = np.isin(np.arange(len(scores_QA)), generator(0, "halves").permutation(len(scores_QA))[::2])
    said_QA = np.full(scores_QA.shape, "", object)
    for half in (half_Q, ~half_Q):
        limits = fitting_scores(scores_QA[~half], right_QA[~half])
        said_QA[half] = [[fit_of(score, limits) for score in row] for row in scores_QA[half]]
    shown = {}
    for name, word in FIT_WORDS.items():
        inside = said_QA == word
        shown[name] = {"share": float(inside.mean()), "right": float(right_QA[inside].mean()) if inside.any() else None}
    return {**fitting_scores(scores_QA, right_QA), "first_five": shown}


def fitting_scores(scores: np.ndarray, right: np.ndarray) -> dict[str, float | None]:
    """For each word the lowest score for which it holds; None where no answers are right that often."""
    order = np.argsort(-scores, axis=None, kind="stable")
    scores, right = scores.ravel()[order], right.ravel()[order]
    begin, lowest, found = 0, None, {}
    for name, least in RIGHT_AT_LEAST.items():
        count = np.arange(1, len(scores) - begin + 1)
        holds = np.flatnonzero((np.cumsum(right[begin:]) >= least * count) & (count >= FEWEST))
        if len(holds):
            begin += int(holds[-1]) + 1
            lowest = float(scores[begin - 1])
        found[name] = lowest
    return found


def fit_of(score: float, limits: dict[str, Any]) -> str:
    """The word for a score."""
    for name in RIGHT_AT_LEAST:
        lowest = limits.get(name, -np.inf)  # what earlier releases kept knows no unlikely answers
        if lowest is not None and score >= lowest:
            return FIT_WORDS[name]
    return FIT_WORDS["unlikely"]


def measure_verdict(scores_QN: np.ndarray, unrelated_QR: np.ndarray, right_QN: np.ndarray) -> dict[str, Any]:
    """How well the best score tells whether a library has something right for a question: with its right images in it,
    and without them."""
    libraries = scores_QN, np.where(right_QN, -np.inf, scores_QN)
    present_Q, absent_Q = (
        np.array([
            standing(float(row_N.max()), int(np.isfinite(row_N).sum()), row_R)
            for row_N, row_R in zip(library_QN, unrelated_QR, strict=True)
        ])
        for library_QN in libraries
    )  # fmt: skip
    return measure_telling(present_Q, absent_Q)


def measure_telling(present_Q: np.ndarray, absent_Q: np.ndarray) -> dict[str, Any]:
    """How well a figure tells questions with an answer from the same ones without: the area under the ROC curve, and
    how many without are found where 5 % of those with are taken for them. Each half of the questions is judged by the
    threshold that the other half sets."""
    above_QQ = (present_Q[:, None] > absent_Q[None]) + 0.5 * (present_Q[:, None] == absent_Q[None])
    drawn, sizes = [], len(present_Q)
    for weights_rQ in resamples(sizes):
        drawn.append(((weights_rQ @ above_QQ) * weights_rQ).sum(axis=1) / sizes**2)
    half_Q = np.isin(np.arange(sizes), generator(0, "halves").permutation(sizes)[: sizes // 2])
    below = np.zeros((2, sizes), bool)
    for half in (half_Q, ~half_Q):
        threshold = np.quantile(present_Q[~half], FALSE_ALARMS)
        below[:, half] = present_Q[half] < threshold, absent_Q[half] < threshold
    shares = {"false_alarms": below[0], "detected": below[1]}
    low, high = percentiles(np.concatenate(drawn))
    found = {"questions": sizes, "auroc": float(above_QQ.mean()), "auroc_low": low, "auroc_high": high}
    for name, hits_Q in shares.items():
        found[name] = float(hits_Q.mean())
        found[f"{name}_low"], found[f"{name}_high"] = bootstrap_interval(hits_Q.astype(float), np.ones(sizes))
    return {**found, "threshold": float(np.quantile(present_Q, FALSE_ALARMS))}
