"""`lapclip probe`: which pretrained towers suit some images and captions. Each network reads some pairs once, and
closed forms say how well two of them can be brought together, without any training."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapclip.commands.choose_recipe import HEADS
from lapclip.config import AUTO, Config, Layer, build_config, parse_settings, read_recipe
from lapclip.data.dataset import Pairs
from lapclip.data.loading import Listing, list_data
from lapclip.data.pixels import View, normalise
from lapclip.data.splits import TRAIN
from lapclip.errors import ConfigError, DataError
from lapclip.evaluation.closed_form import (
    FOLDS,
    Asked,
    Ranks,
    cross_validate,
    fit_cca,
    normed,
    predict_trained,
    relation,
)
from lapclip.machine.choose_device import choose_device
from lapclip.machine.device import Device
from lapclip.machine.other_programs import describe_busy_cores
from lapclip.machine.system_memory import forget_peak, memory_bytes, peak_memory_bytes
from lapclip.measure.timing import Timer
from lapclip.model.pretrained_towers import (
    PretrainedImageTower,
    PretrainedTextTower,
    PretrainedTower,
)
from lapclip.model.shapes import SHAPES
from lapclip.progress import DataProgress, Status, ignore_progress
from lapclip.seeding import generator
from lapclip.suggest import command, set_words, source_word
from lapclip.weights.pretrained_networks import (
    PACKAGES,
    installed_towers,
    open_image,
    open_text,
    taps_of,
)

IMAGES, CAPTIONS_EACH = 800, 2
"""How many are read: docs/probe.md says what more would give."""
LEAST = 40
"""Images below which folds are too small to say anything."""
AT_ONCE, TIMED = 32, 8
"""How many go through a network at once, and how many to find the precision in which it is faster."""


@dataclass(frozen=True)
class ProbeRequest:
    """What the user asked for."""

    data: str
    towers: Sequence[str] = ()
    texts: Sequence[str] = ()
    images: int = IMAGES
    device: str = AUTO
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Callbacks:
    """Callbacks for status and progress."""

    status: Status = lambda _: None
    data: DataProgress | None = None


@dataclass(frozen=True)
class ReadByTower:
    """What a frozen network made of some images or captions, and what that took."""

    name: str
    features: Tensor
    """Normed as the heads do it, a row for each."""
    seconds: float
    memory: int
    """Bytes that the process grew by, at most."""
    parameters: int

    @property
    def seconds_each(self) -> float:
        return self.seconds / max(1, len(self.features))


def probe(request: ProbeRequest, callbacks: Callbacks = Callbacks()) -> dict[str, Any]:
    """Everything `lapclip probe --json` prints."""
    began = time.perf_counter()
    busy = describe_busy_cores()
    images = list(dict.fromkeys(request.towers)) or installed_towers("image")
    texts = list(dict.fromkeys(request.texts)) or installed_towers("text")
    for option, names, kind in (("--towers", images, "image"), ("--texts", texts, "text")):
        if not names:
            raise ConfigError(
                f"No pretrained {kind} tower is installed.", hint=f"{PACKAGES}, or {option} NAME"
            )
    settings = Settings.of(request.data, request.settings)
    device, _ = choose_device(request.device)
    callbacks.status("reading the data")
    sample = draw_sample(settings, request.images, CAPTIONS_EACH, callbacks.data)
    reader = TowerReader(settings, sample, device, callbacks)
    seen = [reader.read_images(name) for name in images]
    said = [reader.read_captions(name) for name in texts]
    found = []
    for text in said:
        for image in seen:
            callbacks.status(f"bringing {image.name} and {text.name} together")
            before = time.perf_counter()
            ranks = cross_validate(fit_cca, image.features, text.features, sample.owner_M)
            fitting_seconds = time.perf_counter() - before
            found.append((_pair(image, text, ranks, sample, fitting_seconds), ranks))
    found.sort(key=lambda each: -each[0]["t2i_r1"])
    pairs, fall = [pair for pair, _ in found], float(np.mean([ranks.fall for _, ranks in found]))
    among = min(ranks.candidates for _, ranks in found)
    asked = Asked(len(sample.rows) * (FOLDS - 1) / FOLDS, among, sample.training, sample.held_out)
    for pair in pairs:
        pair["predicted"] = predict_trained(pair, fall, asked)
    # Of those that the best one does not surely beat, the one that reads all the data soonest.
    best = min(
        (pair for pair, ranks in found if not found[0][1].beats(ranks)),
        key=lambda pair: pair["features_seconds"],
    )
    return {
        "source": request.data,
        "images": len(sample.rows),
        "captions": len(sample.captions),
        "training_images": sample.training,
        "candidates": among,
        "chance": 1 / among,
        "pairs": pairs,
        "recommended": {
            "image": best["image"],
            "text": best["text"],
            "why": _why(best, pairs),
            "command": _train(request, best),
        },
        "device": device.kind,
        "notes": [*sample.notes, *([busy] if busy else [])],
        "seconds": time.perf_counter() - began,
    }


# -- what the networks read --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The settings that heads on pretrained towers would be trained with, and which of the model were asked for."""

    config: Config
    asked: Collection[str]

    @classmethod
    def of(cls, source: str, settings: Sequence[str]) -> Settings:
        layers = [
            read_recipe(HEADS),
            Layer("DATA", {"data": {"source": source}}),
            parse_settings(list(settings)),
        ]
        asked = {name for layer in layers for name in layer.values.get("model", {})}
        return cls(build_config(layers, SHAPES), asked)

    def shape(self, facts: dict[str, Any], **towers: str) -> Any:
        """A model's shape with what a network brings, unless it was asked otherwise."""
        taken = {name: value for name, value in facts.items() if name not in self.asked}
        return replace(self.config.model, **taken, **towers)


@dataclass(frozen=True)
class Sample:
    """Some images for training, with some of the captions of each."""

    listing: Listing
    rows: Sequence[int]
    captions: Sequence[str]
    owner_M: np.ndarray
    """Of each caption, the number of its image in `rows`."""
    training: int
    """Images for training that there are, and captions of theirs."""
    training_captions: int = 0
    held_out: int = 0
    """Images that a trained model would be scored on."""
    notes: Sequence[str] = ()

    def load(self, view: View, progress: DataProgress | None) -> Pairs:
        """The images as a network sees them."""
        return self.listing.load(self.rows, view, progress)[0]


def draw_sample(
    settings: Settings,
    most: int,
    captions_each: int,
    progress: DataProgress | None = None,
    listing: Listing | None = None,
) -> Sample:
    """Some images for training, drawn at random, the same ones each time; those that cannot be read are left out."""
    if most < LEAST:
        raise ConfigError(
            f"--images {most}: {LEAST} is the least that says anything.", hint=f"--images {LEAST}"
        )
    view = View.of(settings.config.model)
    listing = listing or list_data(settings.config.data, view, progress)
    table = listing.table.rows
    training = [
        at
        for at, split in enumerate(listing.named_splits(TRAIN))
        if split == TRAIN and table[at].captions
    ]
    draw = generator(0, "probe")
    chosen = sorted(draw.permutation(len(training))[:most].tolist())
    rows = [training[at] for at in chosen]
    pairs, notes = listing.load(rows, view, progress)
    if listing.drawn is None:  # of copies one is enough: two could not be told apart
        assert pairs.identities is not None
        by_name = {table[at].image.name: at for at in rows}
        first = np.unique(pairs.identities, return_index=True)[1]
        rows = sorted(by_name[pairs.names[at]] for at in first)
    if len(rows) < LEAST:
        raise DataError(
            f"{len(rows)} images with captions can be used, and {LEAST} is the least that says anything.",
            hint=command("data", "check", settings.config.data.source),
        )
    captions, owner = [], []
    for number, at in enumerate(rows):
        own = list(dict.fromkeys(table[at].captions))
        for which in draw.permutation(len(own))[:captions_each]:
            captions.append(own[which])
            owner.append(number)
    every = sum(len(table[at].captions) for at in training)
    named = listing.named_splits(TRAIN).count("val")
    share = settings.config.data.held_out
    learnt = (
        len(training) if named else round(len(training) * (1 - share))
    )  # where splits are drawn, some of them go
    held_out = named or max(1, len(training) - learnt)
    return Sample(listing, rows, captions, np.array(owner), learnt, every, held_out, notes)


@dataclass(frozen=True)
class TowerReader:
    """Reads a sample with frozen networks."""

    settings: Settings
    sample: Sample
    device: Device
    callbacks: Callbacks

    def read_images(self, name: str) -> ReadByTower:
        """Return the features of the sample's images by an image network."""
        memory_before = self._open(name)
        opened = open_image(name)
        shape = self.settings.shape(opened.facts, image_from=name, image_taps=taps_of(name))
        with refusing(name):
            tower = PretrainedImageTower((opened.backbone, opened.spec), shape)
        pixels = self.sample.load(View.of(shape), self.callbacks.data).pixels

        def features(rows: np.ndarray) -> Tensor:
            batch = torch.from_numpy(np.array(pixels[rows])).to(self.device.torch)
            return tower.begin(normalise(batch, shape), tower.depth)

        order = np.arange(len(pixels))
        return self._read(name, tower, order, features, memory_before, "images")

    def read_captions(self, name: str) -> ReadByTower:
        """Return the features of the sample's captions by a text network."""
        memory_before = self._open(name)
        opened = open_text(name)
        tokenizer = opened.tokenizer
        assert tokenizer is not None
        shape = self.settings.shape(opened.facts, text_from=name, text_taps=taps_of(name))
        with refusing(name):
            tower = PretrainedTextTower((opened.backbone, opened.spec), shape)
        captions = self.sample.captions

        def features(rows: np.ndarray) -> Tensor:
            tokens = tokenizer.batch([captions[int(row)] for row in rows], shape.context)
            return tower.begin(torch.from_numpy(tokens).to(self.device.torch), tower.depth)

        # Short captions go together, so that they are not padded to long ones.
        order = np.argsort([tokenizer.length(caption) for caption in captions], kind="stable")
        return self._read(name, tower, order, features, memory_before, "captions")

    def _open(self, name: str) -> int:
        """Report which network is opened, and return the memory in use before."""
        forget_peak()
        self.callbacks.status(f"opening {name}")
        return memory_bytes()

    @torch.inference_mode()
    def _read(
        self,
        name: str,
        tower: PretrainedTower,
        order: np.ndarray,
        features: Callable[[np.ndarray], Tensor],
        memory_before: int,
        what: str,
    ) -> ReadByTower:
        """Compute the features of all rows, in this order, in the faster precision."""
        with refusing(name):
            tower.to(self.device.torch).eval()
        batches = [order[first : first + AT_ONCE] for first in range(0, len(order), AT_ONCE)]
        self.callbacks.status(f"timing the precisions of {name}")
        some = batches[len(batches) // 2][:TIMED]
        dtype = fastest_dtype(tower, lambda: features(some), self.device)
        tower.compute = replace(tower.compute, dtype=dtype)
        report = self.callbacks.data or ignore_progress
        began, parts = time.perf_counter(), []
        for batch in batches:
            parts.append(features(batch).float().cpu())
            report(min(len(order), AT_ONCE * len(parts)), len(order), f"{name} reads {what}")
        seconds = time.perf_counter() - began
        parameters = sum(each.numel() for each in tower.backbone.parameters())
        memory = max(peak_memory_bytes() - memory_before, 4 * parameters)
        rows = torch.cat(parts)[torch.from_numpy(np.argsort(order))]
        return ReadByTower(name, normed(rows.numpy()), seconds, memory, parameters)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Raise ConfigError for a network that cannot be used as a tower."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(f"{name} cannot be used as a tower: {error}.") from error


def fastest_dtype(tower: PretrainedTower, run: Callable[[], object], device: Device) -> torch.dtype:
    """Return the precision in which a network is faster here."""
    took = {}
    for dtype in (torch.float32, torch.bfloat16):
        tower.compute = replace(tower.compute, dtype=dtype)
        took[dtype] = Timer(device.synchronise, rounds=1).time_one(run).median
    return min(took, key=lambda dtype: took[dtype])


# -- whether captions belong to their images ---------------------------------------------------------------------------

ENOUGH, TOLD_BY = 40, 300
"""Images from which on captions are judged, and the most that are read for it."""


def check_belonging(
    listing: Listing, usable: Sequence[int], callbacks: Callbacks = Callbacks()
) -> dict[str, Any] | None:
    """Measure whether captions belong to their images, by the two networks that the recipe `heads` comes with.

    `usable` are the rows whose images can be read. Return None if they are too few, or have too few different captions.
    """
    rows = [at for at in usable if listing.table.rows[at].captions]
    if len(rows) < ENOUGH:
        return None
    chosen = np.unique(np.linspace(0, len(rows) - 1, TOLD_BY).astype(int)).tolist()
    captions, owner = [], []
    for number, at in enumerate(chosen):
        own = listing.table.rows[rows[at]].captions
        captions += [own[0], own[-1]]
        owner += [number, number]
    if len(set(captions)) < ENOUGH:  # where all say the same, none belongs more than another
        return None
    # Data that is mostly broken is what a check is for.
    listing = replace(listing, config=replace(listing.config, broken_share=1.0))
    settings = Settings.of(listing.config.source, [])
    settings = replace(settings, config=replace(settings.config, data=listing.config))
    sample = Sample(listing, [rows[at] for at in chosen], captions, np.array(owner), len(rows))
    device, _ = choose_device(AUTO)
    towers = SHAPES["towers"]
    reader = TowerReader(settings, sample, device, callbacks)
    images = reader.read_images(towers.image_from).features
    texts = reader.read_captions(towers.text_from).features
    callbacks.status("comparing images with captions")
    found = relation(images, (texts[::2] + texts[1::2]) / 2)
    return {
        "images": len(chosen),
        "by": [towers.image_from, towers.text_from],
        "z": found.z,
        "p": found.p,
        "unrelated": found.unrelated,
    }


# -- what it comes to --------------------------------------------------------------------------------------------------


def _pair(
    image: ReadByTower,
    text: ReadByTower,
    ranks: Ranks,
    sample: Sample,
    fitting_seconds: float,
) -> dict[str, Any]:
    return {
        "image": image.name,
        "text": text.name,
        **ranks.recall(),
        "parameters": image.parameters + text.parameters,
        "seconds": image.seconds + text.seconds + fitting_seconds,
        "memory": image.memory + text.memory,
        "image_seconds_each": image.seconds_each,
        "caption_seconds_each": text.seconds_each,
        "features_seconds": image.seconds_each * sample.training
        + text.seconds_each * sample.training_captions,
    }


def _why(best: dict[str, Any], pairs: Sequence[dict[str, Any]]) -> str:
    if len(pairs) == 1:
        return "it is the only one"
    if best is pairs[0]:
        return "it finds the most"
    return f"it cannot be told from the best ({pairs[0]['image']} and {pairs[0]['text']}) and is faster"


def _train(request: ProbeRequest, best: dict[str, Any]) -> str:
    """The command that trains heads on two towers."""
    usual, words = SHAPES["towers"], {}
    if best["image"] != usual.image_from:
        words |= {"model.image_from": best["image"], "model.image_taps": taps_of(best["image"])}
    if best["text"] != usual.text_from:
        words |= {"model.text_from": best["text"], "model.text_taps": taps_of(best["text"])}
    given = [word for setting in request.settings for word in ("--set", setting)]
    return command("train", source_word(request.data), "--recipe", HEADS, *set_words(words), *given)
