"""The tokenizer that belongs to published weights: CLIP's own, or the one that lapclip wrote beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lapclip.data.tokenizers import Tokenizer, clip_tokenizer, load_tokenizer
from lapclip.errors import DataError, WeightsError

OURS = "lapclip_tokenizer.json"
"""Written beside exported weights whose tokenizer is not CLIP's own."""
THEIRS, MERGES = "tokenizer.json", "merges.txt"


def fitting_tokenizer(folder: Path | None, vocabulary: int, where: str) -> Tokenizer:
    """The tokenizer for weights that know so many tokens; `folder` is where its files would be."""
    try:
        own = load_tokenizer(folder / OURS) if folder else None
    except DataError as error:
        raise WeightsError(error.message, hint="download or copy it again") from None
    tokenizer, called = (own, OURS) if own else (clip_tokenizer(), "CLIP's own tokenizer")
    if folder and own is None:
        _check_clips_own(folder, vocabulary)
    if tokenizer.vocabulary != vocabulary:
        raise WeightsError(
            f"{called} does not fit the weights: it has {tokenizer.vocabulary:,} tokens, and {where} knows "
            f"{vocabulary:,}.",
            hint="weights that were trained with CLIP's own tokenizer",
        )
    return tokenizer


def _check_clips_own(folder: Path, vocabulary: int) -> None:
    """Where a folder has a tokenizer, it must be the one that we take for it."""
    for name, read in ((THEIRS, _of_json), (MERGES, _of_text)):
        if not (folder / name).exists():
            continue
        try:
            tokens, merges = read(folder / name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{folder / name} cannot be read: {error}.", hint="download or copy it again") from None
        if tokens != vocabulary:
            raise WeightsError(
                f"The tokenizer does not fit the weights: {folder / name} has {tokens:,} tokens, and the weights "
                f"know {vocabulary:,}.",
                hint="tokenizer and weights of the same model",
            )
        if merges != [tuple(merge) for merge in clip_tokenizer().merges]:
            raise WeightsError(
                f"{folder / name} is another tokenizer than CLIP's own, the only foreign one that can be read.",
                hint="weights that were trained with CLIP's own tokenizer",
            )
        return


def _of_json(path: Path) -> tuple[int, list[tuple[str, ...]]]:
    """How many tokens a tokenizer of Hugging Face has, and its merges; none where it is of another kind."""
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    model = saved["model"]
    vocab = model.get("vocab", {})
    names = set(vocab) if isinstance(vocab, dict) else {piece[0] for piece in vocab}
    names |= {token["content"] for token in saved.get("added_tokens") or ()}
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges", ())]
    return len(names), merges


def _of_text(path: Path) -> tuple[int, list[tuple[str, ...]]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
    return 2 * 256 + len(merges) + 2, merges
