"""`lapclip data check`: one pass over a data set, then what was found and what training on it will need."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lapclip.config import (
    PHOTOS_RECIPE,
    Config,
    Layer,
    build_config,
    parse_settings,
    read_recipe,
    recipe_for,
    replace_in,
)
from lapclip.data.table import Row
from lapclip.data.tokenizers import Tokenizer, choose_tokenizer
from lapclip.data_check.captions import ceilings, count_scripts
from lapclip.data_check.checked_table import SCENES, open_table
from lapclip.data_check.data_oddities import TRAIN, find_all
from lapclip.data_check.image_pass import Seen, look_at_all
from lapclip.data_check.requirements import epoch_seconds, outlook, store_bytes
from lapclip.errors import DataError
from lapclip.model.shapes import SHAPES
from lapclip.progress import Progress


def settings_for(source: str, recipe: str | None, settings: Sequence[str]) -> tuple[Config, str]:
    """The settings that training on the data would begin with, and the recipe they come from."""
    recipe = recipe_for(source, recipe)
    named = Layer("DATA", {"data": {"source": source}})
    config = build_config([read_recipe(recipe), named, parse_settings(list(settings))], SHAPES)
    if config.model.image_from or config.model.text_from:  # what they would take is not reckoned: as from scratch
        return settings_for(source, PHOTOS_RECIPE, settings)
    return config, recipe


def check(source: str, recipe: str | None, settings: Sequence[str], progress: Progress | None = None) -> dict[str, Any]:
    """Everything `lapclip data check --json` prints."""
    began = time.perf_counter()
    config, recipe = settings_for(source, recipe, settings)
    surveyed = open_table(config, progress)
    rows, splits = surveyed.table.rows, surveyed.splits
    if not rows:
        raise DataError(f"No images with captions were found in {source}.", hint="lapclip train --help")
    seen = look_at_all([row.image for row in rows], progress)
    training = [caption for row, split in zip(rows, splits, strict=True) if split == TRAIN for caption in row.captions]
    captions = [caption for row in rows for caption in row.captions]
    tokenizer, why = choose_tokenizer(config.data, training or captions, surveyed.alphabet, config.model.context)
    config = replace_in(config, "model", vocabulary=tokenizer.vocabulary)
    lengths = sorted(tokenizer.length(caption) for caption in captions)
    findings = find_all(surveyed.table, splits, seen, tokenizer, config)
    usable = sum(not look.fault for look in seen)
    learning = sum(split == TRAIN and not look.fault for split, look in zip(splits, seen, strict=True))
    typical = min(config.model.context, -(-lengths[len(lengths) * 95 // 100] // 8) * 8) if lengths else 8
    seconds, origin = epoch_seconds(config, learning, typical) if learning else (0.0, "there is nothing to train on")
    return {
        "source": source,
        "kind": surveyed.table.kind,
        "how": surveyed.table.how,
        "recipe": recipe,
        "images": len(rows),
        "captions": len(captions) + surveyed.table.repeated,
        "classes": list(surveyed.table.classes),
        "splits": _splits(rows, splits),
        "findings": [finding.to_dict() for finding in findings],
        "ceilings": _ceilings(rows, splits, seen, tokenizer, config.model.context),
        "caption_symbols": _lengths(lengths, config.model.context),
        "tokenizer": {"kind": tokenizer.to_dict()["kind"], "vocabulary": tokenizer.vocabulary, "reason": why},
        "scripts": {script: len(members) for script, members in count_scripts(captions).items()},
        "picture_pixels": _sizes(seen),
        "needs": {
            "source_bytes": sum(look.size for look in seen),
            "store_bytes": store_bytes(learning, usable - learning, config.model.image_size),
            "image_size": config.model.image_size,
            "epoch_seconds": seconds,
            "epoch_seconds_from": origin,
        },
        "outlook": outlook(learning, source == SCENES),
        "seconds": time.perf_counter() - began,
    }


def _splits(rows: Sequence[Row], splits: Sequence[str]) -> dict[str, dict[str, int]]:
    captions: Counter[str] = Counter()
    for row, split in zip(rows, splits, strict=True):
        captions[split] += len(row.captions)
    return {split: {"images": count, "captions": captions[split]} for split, count in Counter(splits).items()}


def _ceilings(
    rows: Sequence[Row], splits: Sequence[str], seen: Sequence[Seen], tokenizer: Tokenizer, context: int
) -> dict[str, dict[str, float]]:
    """For each held-out split, the best that any model can score on it."""
    found = {}
    for split in dict.fromkeys(splits):
        members = [at for at, own in enumerate(splits) if own == split and not seen[at].fault]
        if split != TRAIN and members:
            looks = [seen[at].digest for at in members]
            found[split] = ceilings(looks, [rows[at].captions for at in members], tokenizer, context)
    return found


def _lengths(lengths: Sequence[int], context: int) -> dict[str, float]:
    if not lengths:
        return {"median": 0, "longest": 0, "limit": context, "cut": 0}
    cut = sum(length > context for length in lengths)
    return {"median": statistics.median(lengths), "longest": lengths[-1], "limit": context, "cut": cut}


def _sizes(seen: Sequence[Seen]) -> dict[str, float]:
    sides = sorted(min(look.width, look.height) for look in seen if not look.fault)
    if not sides:
        return {}
    return {"shortest": sides[0], "median_short_side": statistics.median(sides), "longest_short_side": sides[-1]}
