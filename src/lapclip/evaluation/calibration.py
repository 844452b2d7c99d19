"""The correction for hubness that a model's search uses, measured on held-out pairs.

`lapclip eval`, and training at its end, measure how much of each image's hubness (hubness.py) to subtract from its
scores. The file that they keep with the model also holds the vectors of the question bank, so search needs no data.

Shapes: N images, E embedding, M captions, Q questions, B texts of a bank, K kinds of question.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lapclip.embedder import Encoder
from lapclip.errors import LapclipError
from lapclip.evaluation.hubness import (
    KINDS,
    SHARES,
    QuestionBank,
    choose_for_captions,
    choose_for_questions,
    closeness,
    count_words,
)
from lapclip.evaluation.short_questions import ShortQuestions, average_precisions
from lapclip.paths import (
    cache_folder,
    check_plain,
    check_size,
    digest_of_bytes,
    parse_json,
    write_atomic,
)
from lapclip.progress import Progress
from lapclip.which_model import WhichModel

FORMAT = 2
CACHE_NAME = "calibration-{}.safetensors"  # of a model that is no run, by its fingerprint
MAX_BYTES = 100_000_000  # a bank of usual size has some ten million


@dataclass(frozen=True)
class Calibration:
    """Correction for hubness of one model."""

    model: str
    """Fingerprint of the model."""
    vectors: dict[str, np.ndarray]
    """Vectors of the question bank, by kind: float16."""
    facts: dict[str, Any]
    """Measurements, as --json prints them."""

    @cached_property
    def digest(self) -> str | None:
        """Digest of the question bank. None if no kind of question is corrected."""
        if not any(self.share(kind) for kind in KINDS):
            return None
        return digest_of_bytes(b"".join(self.vectors[kind].tobytes() for kind in KINDS))[:16]

    def kind(self, text: str) -> str:
        """Return "short" or "whole", by the number of words."""
        return "short" if count_words(text) < int(self.facts["hubness"]["short_below"]) else "whole"

    def share(self, kind: str) -> float:
        """Return the share of an image's hubness that is subtracted from its scores."""
        found = self.facts["hubness"].get(kind) or {}
        return float(found["share"]) if found.get("used") else 0.0

    def less(self, kind: str, close_NK: np.ndarray | None) -> np.ndarray | None:
        """Return what to subtract from the score of each image, or None for no correction.

        It is 0 for an image of average hubness, so that typical scores do not move, and where hubness is not known.
        """
        share = self.share(kind)
        if not share or close_NK is None:
            return None
        usual = np.float32(self.facts["hubness"][kind]["usual"])
        return np.float32(share) * np.nan_to_num(close_NK[:, KINDS.index(kind)] - usual)

    def worth(self) -> tuple[bool, int]:
        """Return the sort key: prefer the run's own val split, then more questions."""
        return bool(self.facts.get("own_val")), int(
            self.facts["hubness"]["whole"].get("questions", 0)
        )

    def gained(self, kind: str) -> str | None:
        """Return a sentence with the gain on held-out pairs, or None if the correction is not used."""
        if not self.share(kind):
            return None
        found = self.facts["hubness"][kind]
        if kind == "whole":
            return (
                "Long queries: images close to every query are ranked down. A caption finds its own image first in "
                f"{found['t2i_r1_with']:.1%} of cases with that, in {found['t2i_r1']:.1%} without."
            )
        return (
            "Short queries: images close to every query are ranked down. The mean average precision of single words is "
            f"{found['map_with']:.3f} with that and {found['map']:.3f} without."
        )


def calibration_path(which: WhichModel, fingerprint: str) -> Path:
    """Return the path of a model's calibration: in its run, else in the cache."""
    if which.run:
        return which.run.calibration
    return cache_folder() / CACHE_NAME.format(fingerprint)


def calibration_of(which: WhichModel, encoder: Encoder) -> Calibration | None:
    """Return the calibration of a model, else of the model it was exported from, else None."""
    run, paths = which.made_by, list[Path]()
    if run and run.calibration.exists():
        paths.append(run.calibration)
    elif not any(cache_folder().glob(CACHE_NAME.format("*"))):
        return None  # a fingerprint takes all weights to make
    own = encoder.fingerprint()
    names = {own, getattr(encoder, "made_from", own)}
    paths += [
        path
        for name in sorted(names)
        if (path := cache_folder() / CACHE_NAME.format(name)).exists()
    ]
    found = [
        one
        for path in paths
        if (one := read_calibration(path, encoder.embedding)) and one.model in names
    ]
    return min(found, key=lambda one: one.model != own, default=None)


def keep_calibration(found: Calibration, path: Path) -> Calibration | None:
    """Save a calibration for search, or return the saved one of the same model if that was measured on more.

    A full or read-only disk is no error: search then works without a correction.
    """
    before = read_calibration(path, found.vectors["whole"].shape[1])
    if before and before.model == found.model and before.worth() > found.worth():
        return before
    metadata = {"lapclip": json.dumps({"model": found.model, **found.facts})}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save(found.vectors, metadata))
    return None


def read_calibration(path: Path, width: int) -> Calibration | None:
    """Return the saved calibration for vectors of this width, or None if there is no sound one."""
    try:
        check_plain(path)
        check_size(path.stat().st_size, MAX_BYTES)
        with safe_open(path, "np") as file:
            facts = parse_json((file.metadata() or {})["lapclip"])
            vectors = {kind: file.get_tensor(kind) for kind in KINDS}
        found = Calibration(str(facts.pop("model")), vectors, facts)
        if any(part.dtype != np.float16 or part.shape[1:] != (width,) for part in vectors.values()):
            return None
        if facts["format"] != FORMAT or not _is_sound(facts):
            return None
        if not all(np.isfinite(part).all() for part in vectors.values()):
            return None
        for kind in KINDS:  # a damaged file raises here, not in the middle of an answer
            if not 0 <= found.share(kind) <= 1 or (found.share(kind) and not len(vectors[kind])):
                return None
            found.less(kind, np.zeros((1, len(KINDS)), np.float32))
            found.gained(kind)
        found.kind("")
        found.worth()
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        SafetensorError,
        LapclipError,
    ):
        return None
    return found


def _is_sound(facts: Any) -> bool:
    """Return whether all numbers are finite: Python reads NaN and Infinity from JSON."""
    if isinstance(facts, dict | list):
        return all(
            _is_sound(each) for each in (facts.values() if isinstance(facts, dict) else facts)
        )
    return not isinstance(facts, int | float) or math.isfinite(
        facts
    )  # of integers beyond all floats it raises


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
    """Measure the correction on held-out pairs, and on short questions about their images.

    `image_M` gives the image of each caption.
    """
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
        precision_SQ = np.stack(
            [average_precisions(scores_QN - s * close_N, questions.right_QN) for s in SHARES]
        )
        hubness["short"] = choose_for_questions(precision_SQ, questions.words)
    for column, kind in enumerate(KINDS):
        if kind in hubness:
            hubness[kind]["usual"] = float(close_NK[:, column].mean())
    return Calibration(encoder.fingerprint(), vectors, {"format": FORMAT, "hubness": hubness})
