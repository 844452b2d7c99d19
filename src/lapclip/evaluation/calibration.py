"""The hubness correction that search uses for a model, measured on held-out pairs.

`lapclip eval`, and training at its end, choose how much of the hubness of an image (hubness.py) to subtract from its
scores. The file that they save with the model also holds the vectors of the caption bank, so search needs no data.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lapclip.embedder import Encoder
from lapclip.errors import LapclipError
from lapclip.evaluation.hubness import CaptionBank, count_words, fit_correction, hubness_of
from lapclip.paths import (
    check_plain,
    check_size,
    digest_of_bytes,
    parse_json,
    write_atomic,
)
from lapclip.progress import Progress
from lapclip.which_model import WhichModel

FORMAT = 4
MAX_BYTES = 100_000_000  # a usual bank has less than ten million


@dataclass(frozen=True)
class Calibration:
    """Hubness correction of one model."""

    model: str
    """Fingerprint of the model."""
    bank: np.ndarray
    """Vectors of the caption bank: float16."""
    share: float
    """Share of the hubness to subtract. 0 if no gain was sure."""
    usual_hubness: float
    """Mean hubness of the held-out images."""
    min_words: int
    """Number of words from which on a query is corrected."""
    recall_before: float
    """Text-to-image R@1 without the correction."""
    recall_after: float

    @cached_property
    def digest(self) -> str | None:
        """Digest of the bank. None if nothing is corrected."""
        return digest_of_bytes(self.bank.tobytes())[:16] if self.share else None

    def corrects(self, query: str) -> bool:
        """Return whether a query is corrected: it is as long as most captions."""
        return self.share > 0 and count_words(query) >= self.min_words

    def penalty(self, hubness: np.ndarray) -> np.ndarray:
        """Return what to subtract from the score of each image.

        It is 0 for an image of usual hubness, so that typical scores do not move, and where hubness is not known.
        """
        return np.float32(self.share) * np.nan_to_num(hubness - np.float32(self.usual_hubness))

    def gain_text(self) -> str:
        """Return a sentence with the gain on held-out pairs."""
        return (
            "Images close to every query are ranked down for long queries. A caption finds its own image first in "
            f"{self.recall_after:.1%} of cases with that, in {self.recall_before:.1%} without."
        )


def calibrate(
    encoder: Encoder,
    bank: CaptionBank,
    images: np.ndarray,
    texts: np.ndarray,
    image_of_text: np.ndarray,
    progress: Progress | None = None,
) -> tuple[Calibration, dict[str, Any]]:
    """Fit the correction on held-out pairs. Return it, and the measurements as `lapclip eval --json` prints them."""
    vectors = encoder.encode_text(bank.captions, progress).astype(np.float16)
    images = images.astype(np.float16).astype(np.float32)  # as an index stores them
    hubness = hubness_of(images, vectors)
    fit = fit_correction(images, texts, image_of_text, hubness)
    calibration = Calibration(
        model=encoder.fingerprint(),
        bank=vectors,
        share=fit.share if fit.used else 0.0,
        usual_hubness=float(hubness.mean()),
        min_words=bank.min_words,
        recall_before=fit.recalls["t2i_r1"],
        recall_after=fit.recalls["t2i_r1_with"],
    )
    measured = {name: value for name, value in vars(fit).items() if name != "recalls"}
    measured |= fit.recalls
    measured["bank"] = len(bank.captions)
    measured["min_words"] = bank.min_words
    return calibration, measured


def calibration_of(which: WhichModel, encoder: Encoder) -> Calibration | None:
    """Return the calibration of the run that made a model, for the model itself and its exports."""
    run = which.made_by
    if run is None or not run.calibration.exists():
        return None
    calibration = read_calibration(run.calibration, encoder.embedding)
    own = encoder.fingerprint()
    is_same_model = calibration and calibration.model in (own, getattr(encoder, "made_from", own))
    return calibration if is_same_model else None


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Save a calibration for search. On a full or read-only disk search works without a correction."""
    facts = asdict(calibration)
    bank = facts.pop("bank")
    metadata = {"lapclip": json.dumps({"format": FORMAT, **facts})}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save({"bank": bank}, metadata))


def read_calibration(path: Path, width: int) -> Calibration | None:
    """Return the saved calibration for vectors of this width, or None if there is no sound one."""
    try:
        check_plain(path)
        check_size(path.stat().st_size, MAX_BYTES)
        with safe_open(path, "np") as file:
            facts = parse_json((file.metadata() or {})["lapclip"])
            bank = file.get_tensor("bank")
        if facts.pop("format") != FORMAT:
            return None
        calibration = Calibration(bank=bank, **facts)
        return calibration if _is_sound(calibration, width) else None
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


def _is_sound(calibration: Calibration, width: int) -> bool:
    """Return whether all values can be used. Python reads NaN and Infinity from JSON."""
    bank = calibration.bank
    numbers = (
        calibration.usual_hubness,
        calibration.recall_before,
        calibration.recall_after,
        calibration.min_words,
    )
    return (
        isinstance(calibration.model, str)
        and all(math.isfinite(number) for number in numbers)  # raises beyond all floats
        and 0 <= calibration.share <= 1
        and (not calibration.share or len(bank) > 0)
        and bank.dtype == np.float16
        and bank.shape[1:] == (width,)
        and bool(np.isfinite(bank).all())
    )
