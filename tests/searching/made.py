"""Images and models that the tests of search share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file

from lapclip.searching.index import Index
from lapclip.searching.indexes import indexes_of
from lapclip.searching.library import Library, index_path
from lapclip.searching.search_model import SearchModel, open_search_model
from lapclip.searching.update_index import IndexUpdate, update_index

BATCH = 4


def draw(path: Path, seed: int, side: int = 40) -> Path:
    """An image of a few large fields of colour, which no other seed has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(fields).resize((side, side), Image.Resampling.NEAREST).save(path)
    return path


def draw_many(folder: Path, count: int) -> list[Path]:
    return [draw(folder / f"{at:03}.png", at) for at in range(count)]


class Watched(SearchModel):
    """The real model, a few images at a time, with something that happens before each batch."""

    def __init__(
        self, model: Path | str, before: Callable[[int], None] = lambda batch: None
    ) -> None:
        real = open_search_model(str(model), "cpu")
        super().__init__(real.which, real.model)
        self.batch, self.before = BATCH, before
        self.batches: list[int] = []
        """Images in each batch so far."""

    def encode_pixels(self, pixels_NSSC: np.ndarray, /) -> np.ndarray:
        self.before(len(self.batches))
        self.batches.append(len(pixels_NSSC))
        return super().encode_pixels(pixels_NSSC)


def index_now(
    folder: Path, model: SearchModel, waiting: Callable[[str], None] | None = None
) -> Library:
    index = Index(index_path(folder, model, indexes_of(folder)))
    found: IndexUpdate = update_index(index, folder, model, None, waiting)
    return Library(folder, index, model, found)


def index_at(folder: Path) -> Path:
    """Where the index of a folder lies that was used last."""
    return indexes_of(folder)[0].path


def another_model(trained: Path, folder: Path) -> Path:
    """A model whose images get other vectors."""
    shutil.copytree(trained / "model", folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if name.startswith("image."))
    weights[name] = weights[name] + np.float32(0.05)
    save_file(weights, folder / "model.safetensors")
    return folder


def names(library: Library) -> list[str]:
    """All that can be found, in the order of their names."""
    hits = library.find("anything", 10_000)
    return sorted(str(hit.path.relative_to(library.folder)) for hit in hits)


def vector_of(library: Library, name: str) -> np.ndarray:
    """What the index holds for an image."""
    table, vectors = library._index.snapshot(library.model.identity)
    entry = next(entry for entry in library._index.entries() if entry.path == name)
    return np.asarray(vectors[table.rows[table.numbers == entry.number][0]], dtype=np.float32)


def vectors_of(images: Sequence[Path], model: SearchModel) -> np.ndarray:
    return model.model.encode_image(images)
