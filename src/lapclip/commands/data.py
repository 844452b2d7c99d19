"""`lapclip data check`: one pass over a data set, then what was found and what training on it will need."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    count_latin,
    find_all,
    inspect_images,
)
from lapclip.data.copies import copy_keys
from lapclip.data.loading import Listing, Signatures, list_data, split_rows, split_rule
from lapclip.data.packed_store import store_bytes
from lapclip.data.sources import find_source
from lapclip.data.splits import TRAIN, are_drawn
from lapclip.data.table import Row, Table
from lapclip.data.tokenizers import choose_tokenizer
from lapclip.errors import DataError
from lapclip.model.shapes import SHAPES
from lapclip.progress import DataProgress, Progress, Status
from lapclip.suggest import command
from lapclip.user_files import check_replaceable

if TYPE_CHECKING:
    from lapclip.training.initial_weights import InitialWeights

ENOUGH_IMAGES = 1_000_000  # from here on, training from scratch is not advised against
MIN_LATIN_SHARE = 0.8  # of the captions, so that the text tower can judge whether they belong


def settings_for(source: str, recipe: str | None, settings: Sequence[str]) -> tuple[Config, str]:
    """Return the settings that training on the data would begin with, and the recipe that they come from.

    Without a recipe it is the one for training from scratch. Pretrained towers that may have to be fetched are not
    opened here: then the settings are those for training from scratch, too.
    """
    recipe = recipe or recipe_from_nothing(source)
    config = build_config(_layers(source, recipe, settings), SHAPES)
    if has_towers(config) and not (uses_default_towers(config) and towers_installed()):
        config = build_config(_layers(source, PHOTOS_RECIPE, settings), SHAPES)
        return replace_in(config, "model", image_from="", text_from=""), PHOTOS_RECIPE
    return config, recipe


def _layers(source: str, recipe: str, settings: Sequence[str]) -> list[Layer]:
    data = Layer("DATA", {"data": {"source": source}})
    return [read_recipe(recipe), data, parse_settings(list(settings))]


def has_towers(config: Config) -> bool:
    """Return whether the model is built on pretrained towers."""
    return bool(config.model.image_from or config.model.text_from)


def uses_default_towers(config: Config) -> bool:
    """Return whether each pretrained tower of the model is the one that the recipe `heads` uses."""
    default = SHAPES["towers"]
    # An empty name is a tower that is trained from scratch.
    has_default_image = config.model.image_from in ("", default.image_from)
    has_default_text = config.model.text_from in ("", default.text_from)
    return has_default_image and has_default_text


def open_towers(config: Config, layers: Sequence[Layer]) -> tuple[Config, InitialWeights | None]:
    """Open the pretrained towers of the model, if it has any. Returns the settings with their shape, too."""
    if not has_towers(config):
        return config, None
    from lapclip.training.initial_weights import find_initial_weights  # brings torch

    return find_initial_weights(config, layers)


def list_images(
    config: Config, progress: Progress | None = None, table: Table | None = None
) -> Listing:
    """List the images and captions of the data, with their splits."""
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
    settled = settle_recipe(
        recipe_for(source, recipe), [f"data.source={json.dumps(source)}", *settings]
    )
    train_recipe = settled.recipe
    config, recipe = settings_for(source, train_recipe, settings)
    listing = list_images(config, progress, settled.table.take())
    rows = listing.table.rows
    if not rows:
        raise DataError(
            f"No images with captions were found in {source}.", hint="lapclip train --help"
        )
    facts = inspect_images([row.image for row in rows], progress)
    splits = _assign_splits(listing, facts)
    captions, training_captions = [], []
    for row, split in zip(rows, splits, strict=True):
        captions += row.captions
        if split == TRAIN:
            training_captions += row.captions

    status("cutting captions into tokens")
    config, towers = open_towers(config, _layers(source, recipe, settings))
    if towers and towers.tokenizer:
        tokenizer, why_tokenizer = towers.tokenizer, "the one of the pretrained text tower"
    else:
        tokenizer, why_tokenizer = choose_tokenizer(
            config.data, training_captions or captions, listing.alphabet, config.model.context
        )
    config = replace_in(config, "model", vocabulary=tokenizer.vocabulary)
    lengths = sorted(tokenizer.length(caption) for caption in captions)
    data = CheckedData(listing.table, splits, facts, tokenizer, config)

    status("looking whether captions belong to their images")
    belonging = _check_belonging(listing, data.usable, captions, status, data_progress)
    status("looking for copies and other faults")
    findings = find_all(data, belonging)
    if page is not None:
        status("writing the page")
        write_page(page, find_source(source).title_of(config.data), data, findings)

    training = sum(splits[row] == TRAIN for row in data.usable)
    held_out = len(data.usable) - training
    usable_rows = [rows[row] for row in data.usable]
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
        "usable": {
            "images": len(data.usable),
            "captions": sum(len(row.captions) for row in usable_rows),
        },
        "splits": _count_splits(usable_rows, [splits[row] for row in data.usable]),
        "split_rule": split_rule(config.data) if are_drawn(rows) else "",
        "broken_share_needed": listing.table.share_needed(len(rows) - len(data.usable)),
        "findings": [finding.to_dict() for finding in findings],
        "belonging": belonging,
        "page": str(page or ""),
        "ceilings": _ceilings(data),
        "caption_symbols": _describe_lengths(lengths, config.model.context),
        "tokenizer": {
            "kind": tokenizer.to_dict()["kind"],
            "vocabulary": tokenizer.vocabulary,
            "reason": why_tokenizer,
        },
        "picture_pixels": _describe_sizes(facts),
        "needs": {
            "source_bytes": sum(each.size for each in facts),
            "store_bytes": store_bytes(training, held_out, config.model.image_size),
            "image_size": config.model.image_size,
        },
        "outlook": find_source(source).outlook or outlook(training, train_recipe, source),
        "train_recipe": train_recipe,
        "seconds": time.perf_counter() - began,
    }


def _check_belonging(
    listing: Listing,
    usable: Sequence[int],
    captions: Sequence[str],
    status: Status,
    data_progress: DataProgress | None,
) -> dict[str, Any] | None:
    """Measure whether captions belong to their images.

    None if that cannot be measured: without the towers, with too few images, or in scripts that the text tower does not
    know. It is not measured for drawn images and for names of classes, which always belong.
    """
    always_belong = listing.drawn is not None or listing.table.classes
    if always_belong or not towers_installed():
        return None
    if count_latin(captions) < MIN_LATIN_SHARE * len(captions):
        return None
    from lapclip.commands.probe import Callbacks, check_belonging  # brings torch

    return check_belonging(listing, usable, Callbacks(status, data_progress))


def _assign_splits(listing: Listing, facts: Sequence[ImageFacts]) -> Sequence[str]:
    """Return the split of each row, as training assigns it, from images that were read already."""
    if listing.drawn is not None or split_rule(listing.config) != BY_CONTENT:
        return listing.splits
    usable = [row for row, each in enumerate(facts) if not each.fault]
    keys = copy_keys(
        [facts[row].content for row in usable], [facts[row].signature for row in usable]
    )
    signatures = Signatures(dict(zip(usable, keys, strict=True)))
    return split_rows(listing.config, listing.table.rows, signatures)


def outlook(training: int, recipe: str = PHOTOS_RECIPE, source: str = "DATA") -> str:
    """Return what to expect of training on so many images with a recipe, with measured figures."""
    if not training:
        return "No image can be used for training."
    if recipe == HEADS:
        return outlook_from_pretrained(training)
    if training < ENOUGH_IMAGES:
        return outlook_from_few(training, source)
    return (
        f"{training:,} training images can train a model from scratch. It stays far behind models trained on "
        "hundreds of millions: ViT-B/32 after 13 million samples had a Flickr30k R@1 of 0.014 to 0.029 "
        "(DataComp, small)."
    )


def outlook_from_pretrained(training: int) -> str:
    """Return what to expect of training on top of two pretrained networks."""
    text = (
        f"lapclip train starts from two small pretrained networks (recipe {HEADS}) and trains on "
        f"{training:,} images. Among 1,000 photos, 7.8% of captions found their own photo first after training "
        "on 300 photos, 13.9% after 1,000 and 24.7% after 6,000, with five captions each (docs/finetune.md)."
    )
    if not towers_installed():
        text += f" They are not installed. To install them: {EXTRA}"
    return text


def outlook_from_few(training: int, source: str) -> str:
    """Return what to expect of training from scratch on few images, and what works better."""
    better = command("train", source, "--recipe", HEADS)
    if not towers_installed():
        better = f"{EXTRA}, then {better}"
    return (
        f"{training:,} training images are few for training from scratch. Flickr8k's 6,000, with five captions "
        "each, gave a text-to-image R@10 of 0.31 over 1,000 images, and two small pretrained networks gave 0.66 "
        f"in a third of the time (docs/photos.md, docs/finetune.md): {better}"
    )


def _count_splits(rows: Sequence[Row], splits: Sequence[str]) -> dict[str, dict[str, int]]:
    """Count the images and captions of each split."""
    counts: dict[str, dict[str, int]] = {}
    for row, split in zip(rows, splits, strict=True):
        count = counts.setdefault(split, {"images": 0, "captions": 0})
        count["images"] += 1
        count["captions"] += len(row.captions)
    return counts


def _ceilings(data: CheckedData) -> dict[str, dict[str, float]]:
    """Return the best scores that any model can reach on each held-out split."""
    rows_by_split: dict[str, list[int]] = {}
    for row in data.usable:
        rows_by_split.setdefault(data.splits[row], []).append(row)
    found = {}
    for split, rows in rows_by_split.items():
        if split != TRAIN:
            contents = [data.facts[row].content for row in rows]
            captions = [data.table.rows[row].captions for row in rows]
            found[split] = ceilings(contents, captions, data.tokenizer, data.config.model.context)
    return found


def _describe_lengths(lengths: Sequence[int], context: int) -> dict[str, float]:
    """Describe the lengths of captions in tokens, from sorted ones."""
    return {
        "median": statistics.median(lengths) if lengths else 0,
        "longest": lengths[-1] if lengths else 0,
        "limit": context,
        "cut": sum(length > context for length in lengths),
    }


def _describe_sizes(facts: Sequence[ImageFacts]) -> dict[str, float]:
    """Describe the short sides of the images in pixels."""
    sides = sorted(min(each.width, each.height) for each in facts if not each.fault)
    if not sides:
        return {}
    return {
        "shortest": sides[0],
        "median_short_side": statistics.median(sides),
        "longest_short_side": sides[-1],
    }
