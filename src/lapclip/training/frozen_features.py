"""Features of the frozen part of each tower, computed once for all images and captions and cached: training goes on
from there. The result is the same, up to rounding.

Shapes: N images or captions, T tokens of all captions together.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lapclip.config import NEVER, Config
from lapclip.data.batches import BatchPlan
from lapclip.data.dataset import DataSet, Pairs
from lapclip.data.packed_store import UNUSED, room_left
from lapclip.data.pixels import normalise, view
from lapclip.data.ragged import Ragged
from lapclip.data.tokenizers import pad
from lapclip.embedder import Embedder, distinct_captions
from lapclip.errors import DataError
from lapclip.evaluation.closed_form import fit_cca, normed
from lapclip.fingerprint import frozen_fingerprint
from lapclip.machine.desktop import ends_in_order
from lapclip.machine.ranks import ALONE, Ranks
from lapclip.model.clip import CLIP
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.paths import cache_folder, sweep, write_atomic
from lapclip.progress import DataProgress, Progress
from lapclip.text import duration
from lapclip.text import size as size_text
from lapclip.together import name_here
from lapclip.training.cuda_graph import AnyStep

IMAGES, CAPTIONS = 32, 64
"""How many go through a tower at once."""
LARGE_FEATURE = 1e4
"""Features beyond which half precision is not trusted."""
TOGETHER = 4096
"""Captions that are sorted by their length before they go through."""


class NoRoom(Exception):
    """The disk has no room for features."""


@dataclass(frozen=True)
class CachedFeatures:
    """The features of a run: of its training pairs, which a plan takes, and of its held-out pairs."""

    images: np.ndarray | None
    """(views, N, ...)"""
    captions: Ragged | None
    held_out: HeldOutFeatures
    notes: list[str]
    """What the user should know."""
    phrases: Ragged | None = None
    """None where only whole captions are learnt."""
    summary: str = ""
    """What was computed, how long that took and how large it is; empty where nothing is cached."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cached, and what is frozen is computed at each step."""
        return self.images is None and self.captions is None

    def of_images(self, rows: np.ndarray, views: np.ndarray) -> np.ndarray | None:
        return None if self.images is None else self.images[views, rows]

    def of_captions(self, captions: np.ndarray, length: int) -> np.ndarray | None:
        return None if self.captions is None else self.captions.padded(captions, length)

    def of_phrases(self, phrases: np.ndarray, length: int) -> np.ndarray | None:
        return None if self.phrases is None else self.phrases.padded(phrases, length)


@dataclass(frozen=True)
class HeldOutFeatures:
    """Features of pairs that are scored again and again."""

    pairs: Pairs
    image: np.ndarray | None
    text: Ragged | None


class FeatureEmbedder(Embedder):
    """An embedder that goes on from cached features where it is asked for those pairs."""

    def __init__(
        self, embedder: Embedder, frozen: HeldOutFeatures, boundaries: dict[str, int]
    ) -> None:
        super().__init__(embedder.model, embedder.tokenizer, embedder.device)
        self.batch, self._frozen, self._boundaries = embedder.batch, frozen, boundaries

    def encode_pairs(
        self, pairs: Pairs, progress: Progress | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if pairs is not self._frozen.pairs:
            return super().encode_pairs(pairs, progress)
        captions, which, owner = distinct_captions(pairs)
        images = self._images(pairs)
        texts = self._texts(captions)
        return images, texts[which], owner

    @torch.inference_mode()
    def _images(self, pairs: Pairs) -> np.ndarray:
        cached = self._frozen.image
        if cached is None:
            return self.encode_pixels(pairs.pixels)
        blocks = []
        for at in range(0, len(cached), self.batch):
            features = torch.from_numpy(np.array(cached[at : at + self.batch])).to(
                self.device.torch
            )
            blocks.append(
                self.model.finish_image(features, self._boundaries["image"]).cpu().numpy()
            )
        return np.concatenate(blocks)

    @torch.inference_mode()
    def _texts(self, captions: Sequence[str]) -> np.ndarray:
        cached = self._frozen.text
        if cached is None:
            return self.encode_text(captions)
        blocks = []
        for at in range(0, len(captions), self.batch):
            tokens_BL = self.tokenizer.batch(
                captions[at : at + self.batch], self.model.shape.context
            )
            numbers = np.arange(at, at + len(tokens_BL))
            device = self.device.torch
            features = torch.from_numpy(cached.padded(numbers, tokens_BL.shape[1])).to(device)
            tokens = torch.from_numpy(tokens_BL).to(device)
            blocks.append(
                self.model.finish_text(features, tokens, self._boundaries["text"]).cpu().numpy()
            )
        return np.concatenate(blocks)


def cache_features(
    step: AnyStep,
    embedder: Embedder,
    plan: BatchPlan,
    data: DataSet,
    config: Config,
    progress: DataProgress | None,
    ranks: Ranks = ALONE,
    asked: float | None = None,
) -> CachedFeatures | None:
    """Compute what is frozen, or find it in the cache. None where nothing is frozen, or nothing is to be cached.
    Several ranks compute it in shares, and each has all of it. `asked` is when that began: by `time.perf_counter`, with
    what ranks need to compute together."""
    model, boundaries = step.model, step.boundaries
    chosen, notes = towers_to_cache(model, boundaries, config)
    if not chosen:
        return (
            CachedFeatures(None, None, HeldOutFeatures(data.held_out, None, None), notes)
            if notes
            else None
        )
    report = progress or (lambda done, total, what="": None)
    began = time.perf_counter()
    maker = _FeatureMaker(step, plan, data, config, report, ranks)
    try:
        images = maker.images() if "image" in chosen else None
        after_images = time.perf_counter()
        captions = maker.captions() if "text" in chosen else None
        phrases = maker.phrases() if captions is not None and plan.phrases else None
        after_captions = time.perf_counter()
        frozen = HeldOutFeatures(
            data.held_out,
            maker.held_out_images() if "image" in chosen else None,
            maker.held_out_captions(embedder) if "text" in chosen else None,
        )
    except NoRoom as error:
        notes.append(
            f"what is frozen is computed at each step, because features find no room: {error}"
        )
        return CachedFeatures(None, None, HeldOutFeatures(data.held_out, None, None), notes)
    arrays = [
        images,
        None if captions is None else captions.values,
        None if phrases is None else phrases.values,
        frozen.image,
        None if frozen.text is None else frozen.text.values,
    ]
    size = sum(array.nbytes for array in arrays if array is not None)
    covered = []
    if images is not None:
        views = f" in {len(images)} views" if len(images) > 1 else ""
        covered.append(f"{len(data.train):,} images{views}")
    if captions is not None:
        cut = f" and {len(plan.phrases):,} phrases of them" if phrases is not None else ""
        covered.append(f"{len(plan.captions):,} captions{cut}")
    if maker.found:
        how = "found in the cache"
    else:
        # An epoch looks at each image once, through one view, and at one of its captions.
        saved = (after_images - began) / len(images) if images is not None else 0.0
        saved += (
            (after_captions - after_images)
            * len(data.train)
            / max(1, len(plan.captions))
            * (captions is not None)
        )
        took = duration(time.perf_counter() - (began if asked is None else asked))
        how = f"computed once in {took}, saves about {duration(saved)} an epoch"
    summary = f"features of {' and '.join(covered)}: {how} ({size_text(size)})"
    return CachedFeatures(images, captions, frozen, notes, phrases, summary)


MOST_FITTED = 10_000
"""Images that the closed form is fitted to; more would cost memory and change little."""


START_POWER = 0.5
"""How a direction counts at the start of heads, by its correlation. Measured: 0 and 1 are a little worse."""
LEAST_CORRELATED = 1e-2
"""Directions shorter than this share of the longest say nothing: few images have few."""
REST = 0.1
"""How long the other directions are, which start at random, as a share of what they would be without a closed form."""


@torch.no_grad()
def start_heads(model: CLIP, features: CachedFeatures | None, data: DataSet) -> bool:
    """Give new heads the linear maps that canonical correlation analysis finds, in the place of random ones; their
    hidden layers start at zero as ever. False where more learns than the heads of both towers."""
    pairs = None if features is None else _fitted_pairs(features, data)
    if (
        pairs is None
        or not isinstance(model.image, PretrainedTower)
        or not isinstance(model.text, PretrainedTower)
    ):
        return False
    maps = fit_cca(*pairs, width=model.shape.embedding, power=START_POWER)
    found = [maps.image_FE, maps.text_GE]
    lengths = torch.stack([map_FE.norm(dim=0) for map_FE in found])
    known_E = (lengths > LEAST_CORRELATED * lengths.amax(1, keepdim=True)).all(0)
    for head, map_FE in zip((model.image.head, model.text.head), found, strict=True):
        map_FE = map_FE[:, known_E]
        # As long as random values are, so that the learning rate fits.
        map_FE = map_FE * (map_FE.shape[1] ** 0.5 / map_FE.norm())
        head.projection.mul_(REST)
        head.projection[:, : map_FE.shape[1]] = map_FE.to(head.projection)
    return True


def _fitted_pairs(features: CachedFeatures, data: DataSet) -> tuple[Tensor, Tensor] | None:
    """Normed features of training images, and the mean of those of their captions; None where more learns than the
    heads of both towers."""
    if features.images is None or features.captions is None:
        return None
    if features.images.ndim != 3 or features.captions.first_N is not None:
        return None
    first_N = np.cumsum([0, *(len(options) for options in data.train.captions)])
    step = -(-len(data.train) // MOST_FITTED)
    rows = [row for row in range(0, len(data.train), step) if first_N[row] < first_N[row + 1]]
    captions = torch.stack(
        [normed(features.captions.values[first_N[row] : first_N[row + 1]]).mean(0) for row in rows]
    )
    return normed(features.images[0][rows]), captions


def with_features(embedder: Embedder, features: CachedFeatures | None, step: AnyStep) -> Embedder:
    """The embedder, which takes cached features where there are some."""
    return (
        embedder
        if features is None
        else FeatureEmbedder(embedder, features.held_out, step.boundaries)
    )


def towers_to_cache(
    model: CLIP, boundaries: dict[str, int], config: Config
) -> tuple[list[str], list[str]]:
    """The towers whose frozen part is worth caching, and why another's is not."""
    train = config.train
    frozen = [
        tower
        for tower in ("image", "text")
        if _has_frozen_blocks(getattr(model, tower).depth, boundaries[tower])
    ]
    if train.features == NEVER:
        return [], []
    chosen, notes = [], []
    for tower in frozen:
        network = getattr(model, tower)
        if tower == "image" and not train.views:
            new_crops = (
                "because each has new crops; with --set train.views=4 four of each are cached"
            )
            notes.append(f"images go through the frozen tower at each step, {new_crops}")
        elif tower == "image" and train.cheap_size:
            notes.append(
                "images go through the frozen tower at each step, because it sees them in several sizes"
            )
        elif tower == "text" and train.symbol_dropout:
            notes.append(
                "captions go through the frozen tower at each step, because each has other tokens left out"
            )
        elif isinstance(network, PretrainedTower) and not network.divides(boundaries[tower]):
            notes.append(
                f"the {tower} tower cannot be run in two parts, so it is run whole at each step"
            )
        else:
            chosen.append(tower)
    return chosen, notes


class _FeatureMaker:
    """Computes features with the model that the step computes with, or reads them."""

    def __init__(
        self,
        step: AnyStep,
        plan: BatchPlan,
        data: DataSet,
        config: Config,
        report: DataProgress,
        ranks: Ranks,
    ) -> None:
        self._worker, self._model, self._device, self._boundaries = (
            step.worker,
            step.model,
            step.device,
            step.boundaries,
        )
        self._plan, self._data, self._config, self._report = plan, data, config, report
        self._ranks = ranks
        self._fingerprints = {
            tower: frozen_fingerprint(self._model, tower) for tower in ("image", "text")
        }
        self.found = True
        """Whether all of it was in the cache."""

    def images(self) -> np.ndarray:
        """Of the training images, (views, N, ...)."""
        boxes = self._plan.boxes
        views, count = boxes.shape[:2]

        def compute(chunk: tuple[int, slice]) -> np.ndarray:
            at, rows = chunk
            return self._image_features(
                self._worker, self._data.train.pixels[rows], boxes[at, rows]
            )

        def blocks() -> Iterator[np.ndarray]:
            chunks = [(at, rows) for at in range(views) for rows in _slices(count, IMAGES)]
            for (at, rows), block in zip(
                chunks, self._ranks.computed_in_shares(chunks, compute), strict=True
            ):
                self._report(
                    at * count + rows.stop, views * count, "the pretrained network reads images"
                )
                yield block

        train = self._config.train
        about = (train.views, train.crop, train.flip, train.seed)
        return self._array("image", ("train", *about), (views, count), blocks)

    def held_out_images(self) -> np.ndarray:
        """Of the images that are scored, as they are scored."""
        pixels = self._data.held_out.pixels

        def blocks() -> Iterator[np.ndarray]:
            chunks = list(_slices(len(pixels), IMAGES))
            made = self._ranks.computed_in_shares(
                chunks, lambda rows: self._image_features(self._model, pixels[rows], None)
            )
            for rows, block in zip(chunks, made, strict=True):
                self._report(rows.stop, len(pixels), "the pretrained network reads held-out images")
                yield block

        return self._array("image", ("val",), (len(pixels),), blocks)

    def captions(self) -> Ragged:
        """Of all training captions."""
        what = "the pretrained network reads captions"
        return self._caption_features(self._worker, self._plan.captions, "train", what)

    def phrases(self) -> Ragged:
        """Of all phrases of the training captions."""
        return self._caption_features(
            self._worker, self._plan.phrases, "train", "the pretrained network reads phrases"
        )

    def held_out_captions(self, embedder: Embedder) -> Ragged:
        """Of the different captions that are scored."""
        captions, _, _ = distinct_captions(self._data.held_out)
        token_lists = embedder.tokenizer.encode_all(captions, self._config.model.context)
        return self._caption_features(
            self._model, token_lists, "val", "the pretrained network reads held-out captions"
        )

    @torch.inference_mode()
    def _image_features(
        self, model: CLIP, pixels_BSSC: np.ndarray, boxes_B5: np.ndarray | None
    ) -> np.ndarray:
        device = self._device.torch
        pixels = normalise(torch.from_numpy(np.array(pixels_BSSC)).to(device), self._config.model)
        if boxes_B5 is not None:
            pixels = view(
                pixels, torch.from_numpy(boxes_B5).to(device), self._config.model.image_size
            )
        return _as_array(model.image.begin(pixels, self._boundaries["image"]))

    @torch.inference_mode()
    def _caption_features(
        self, model: CLIP, token_lists: Sequence[np.ndarray], split: str, what: str
    ) -> Ragged:
        pooled = self._boundaries["text"] == model.text.depth
        lengths = [len(caption) for caption in token_lists]
        first_N = None if pooled else np.cumsum([0, *lengths])

        def compute(chosen: list[int]) -> np.ndarray:
            tokens_BL = pad(
                [token_lists[at] for at in chosen],
                self._config.model.context,
                self._plan.tokenizer.padding,
            )
            tokens = torch.from_numpy(tokens_BL).to(self._device.torch)
            return _as_array(model.text.begin(tokens, self._boundaries["text"]))

        def blocks() -> Iterator[np.ndarray]:
            done = 0
            for rows in _slices(len(token_lists), TOGETHER):
                together: dict[int, np.ndarray] = {}
                order = sorted(range(rows.start, rows.stop), key=lengths.__getitem__)
                chunks = [order[some] for some in _slices(len(order), CAPTIONS)]
                for chosen, features in zip(
                    chunks, self._ranks.computed_in_shares(chunks, compute), strict=True
                ):
                    together |= {
                        at: row[None] if pooled else row[: lengths[at]]
                        for at, row in zip(chosen, features, strict=True)
                    }
                    done += len(chosen)
                    self._report(done, len(token_lists), what)
                yield np.concatenate([together[at] for at in range(rows.start, rows.stop)])

        rows = len(token_lists) if first_N is None else int(first_N[-1])
        digest = hashlib.sha256(
            b"".join(caption.tobytes() + b"|" for caption in token_lists)
        ).hexdigest()
        return Ragged(self._array("text", (split, digest), (rows,), blocks), first_N)

    def _array(
        self,
        tower: str,
        about: tuple,
        rows: tuple[int, ...],
        blocks: Callable[[], Iterable[np.ndarray]],
    ) -> np.ndarray:
        """Read from the cache, or made and written there."""
        dtype = self._config.train.dtype
        about = (*about, self._fingerprints[tower], self._boundaries[tower])
        path = array_path(tower, about, self._data.fingerprint, dtype)
        found = read_array(path)
        fits = found is not None and found.shape[: len(rows)] == rows
        if not self._ranks.agreed(None if fits else "not cached"):
            assert found is not None
            return found
        self.found = False
        made = iter(blocks())
        first = next(made)
        whole = (*rows, *first.shape[1:])
        # Half the room where half the digits were computed, unless there are numbers that it cannot hold.
        if dtype != "float32" and about[0] == "train" and _fits_half(first):
            try:
                return self._write(
                    path, _halves(_chained(first, made)), whole, np.dtype(np.float16)
                )
            except (
                _TooLarge
            ):  # in a later block; few models have such features, so all are simply computed again
                return self._write(path, blocks(), whole, np.dtype(np.float32))
        return self._write(path, _chained(first, made), whole, np.dtype(np.float32))

    def _write(
        self, path: Path, blocks: Iterable[np.ndarray], whole: tuple[int, ...], kind: np.dtype
    ) -> np.ndarray:
        needed = int(np.prod(whole)) * kind.itemsize
        if self._ranks.agreed(None if has_room(path, needed) else "no room"):
            raise NoRoom(
                f"they would take {needed / 1e9:,.1f} GB, more than half of what the disk has left"
            )
        return write_array(path, blocks, whole, kind)


class _TooLarge(Exception):
    """Features that half precision cannot hold."""


def _fits_half(block: np.ndarray) -> bool:
    return not block.size or bool(
        np.abs(block).max() < LARGE_FEATURE
    )  # not where one of them is no number, either


def _halves(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for block in blocks:
        if not _fits_half(block):
            raise _TooLarge
        yield block


def _has_frozen_blocks(depth: int, first: int) -> bool:
    """Whether a tower has a frozen part that costs something: not the embedding alone."""
    return first == depth or first > 0


def _as_array(features: Tensor) -> np.ndarray:
    return features.float().cpu().numpy()


def _slices(count: int, size: int) -> Iterator[slice]:
    for at in range(0, count, size):
        yield slice(at, min(count, at + size))


def _chained(first: np.ndarray, rest: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    yield first
    yield from rest


ROOM = 0.5
"""Share of the free disk that an array may take."""


def array_path(*about: object) -> Path:
    """The file of an array that depends on all that is given."""
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:24]
    return cache_folder() / name_here(f"features-{key}.npy")


def has_room(path: Path, needed: int) -> bool:
    """Whether the disk has room for so many bytes."""
    return path.exists() or needed <= ROOM * room_left(path.parent)


def read_array(path: Path) -> np.ndarray | None:
    """The array, memory-mapped, or None where it has to be made."""
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return None
    with suppress(OSError):  # of a cache that can only be read
        os.utime(path)  # its date is that of the last use
    return found


def write_array(
    path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Write rows as they come, then give the file its name, and read it."""

    def write(partial: Path) -> None:
        # In sequence, not through a memory map: there a full disk would be a signal instead of an error.
        # Others may not read what was made of private photos.
        with open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            header = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": shape,
            }
            np.lib.format.write_array_header_1_0(file, header)
            for rows in blocks:
                file.write(np.ascontiguousarray(rows, dtype=dtype).tobytes())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        with ends_in_order():
            write_atomic(path, write)
    except OSError as error:
        # Windows replaces no file that is mapped: another process was first with the same array, and works with it.
        found = read_array(path)
        if found is not None and found.shape == shape and found.dtype == dtype:
            return found
        raise DataError(
            f"Cannot write features to {path}: {error.strerror or error}.",
            hint="LAPCLIP_CACHE=FOLDER with a folder that has room, or --set train.features=never",
        ) from error
    found = read_array(path)
    assert found is not None
    return found


def _sweep(folder: Path) -> None:
    """Remove what nobody used for a month, and what killed processes left half-written."""
    sweep(folder)
    for path in folder.glob("features-*.npy"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED:
                path.unlink()
