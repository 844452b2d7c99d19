"""Models between two: (1 - alpha) start + alpha end, in every tensor, the temperature too (WiSE-FT, Wortsman et al.
2022, arXiv 2109.01903).

What is equal in both is computed once for all of them: images and captions go up to the first block that differs, and
from there on once for each alpha.

Shapes: A alphas, N images or captions, E embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapclip.data.dataset import Pixels
from lapclip.data.pixels import normalise
from lapclip.embedder import Embedder
from lapclip.errors import RunError
from lapclip.model.freezing import EMBEDDING, HEAD, first_block, parts_of
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.progress import Progress

HELD = 4
"""Batches that are in memory at once between their two parts: values are changed once for so many."""


class Blend:
    """A model that can take all values between its start and its end. `embedder` has those of the last alpha."""

    def __init__(self, start: Embedder, end: Embedder) -> None:
        """`end` becomes the embedder whose values change."""
        check_same_form(start, end)
        firsts, lasts = start.model.state_dict(), end.model.state_dict()
        self.embedder = end
        self._ends = {
            name: (firsts[name], last.clone()) for name, last in lasts.items() if not torch.equal(firsts[name], last)
        }
        self.blocks = {tower: self._block(tower) for tower in ("image", "text")}
        """The block of each tower up to which both are equal; 0 where nothing that costs time is."""

    def differs(self, tower: str) -> bool:
        """Whether anything of a tower is not equal in both."""
        return any(name.startswith(f"{tower}.") for name in self._ends)

    @torch.no_grad()
    def mix(self, alpha: float, tower: str = "") -> None:
        """Give the model the values at an alpha, or one tower alone. At 0 and 1 they are those of the start and of the
        end to the last bit."""
        state = self.embedder.model.state_dict()
        for name, (first, last) in self._ends.items():
            if name.startswith(tower):
                whole = last if alpha else first  # numbers that count something are not mixed
                state[name].copy_(torch.lerp(first, last, alpha) if first.is_floating_point() else whole)

    def repeated_parameters(self) -> int:
        """How many numbers are computed with once for each alpha."""
        parts = parts_of(self.embedder.model)
        total = 0
        for name, parameter in self.embedder.model.named_parameters():
            tower, _, part = parts[name].partition(".")
            if part and self.differs(tower) and _block(part) >= self.blocks[tower]:
                total += parameter.numel()
        return total

    def encode_pixels(self, pixels_NSSC: Pixels, alphas: Sequence[float], progress: Progress) -> np.ndarray:
        """Embeddings of images at each alpha, (A, N, E)."""
        embedder, block = self.embedder, self.blocks["image"]
        model = embedder.model

        def begun() -> Iterator[Tensor]:
            for at in range(0, len(pixels_NSSC), embedder.batch):
                pixels = torch.from_numpy(np.array(pixels_NSSC[at : at + embedder.batch])).to(embedder.device.torch)
                pixels = normalise(pixels, model.shape)
                yield model.image.begin(pixels, block) if block else pixels

        def finished(held: Tensor) -> Tensor:
            return model.finish_image(held, block) if block else model.encode_image(held)

        return self._encode("image", begun(), finished, len(pixels_NSSC), alphas, progress)

    def encode_text(self, captions: Sequence[str], alphas: Sequence[float], progress: Progress) -> np.ndarray:
        """Embeddings of captions at each alpha, (A, N, E)."""
        embedder, block = self.embedder, self.blocks["text"]
        model = embedder.model

        def begun() -> Iterator[tuple[Tensor, Tensor]]:
            for at in range(0, len(captions), embedder.batch):
                tokens_BL = embedder.tokenizer.batch(captions[at : at + embedder.batch], model.shape.context)
                tokens = torch.from_numpy(tokens_BL).to(embedder.device.torch)
                yield tokens, model.text.begin(tokens, block) if block else tokens

        def finished(held: tuple[Tensor, Tensor]) -> Tensor:
            return model.finish_text(held[1], held[0], block) if block else model.encode_text(held[0])

        return self._encode("text", begun(), finished, len(captions), alphas, progress)

    @torch.inference_mode()
    def _encode(
        self,
        tower: str,
        begun: Iterator[Any],
        finished: Callable[[Any], Tensor],
        count: int,
        alphas: Sequence[float],
        progress: Progress,
    ) -> np.ndarray:
        """Go through all batches once, some at a time, and end them once for each alpha."""
        own = list(alphas) if self.differs(tower) else [1.0]  # one is enough where all are equal
        found_ANE = np.zeros((len(own), count, self.embedder.model.shape.embedding), dtype=np.float32)
        first = 0
        while held := list(islice(begun, HELD)):
            size = 0
            for number, alpha in enumerate(own):
                self.mix(alpha, tower)
                rows_NE = np.concatenate([finished(batch).cpu().numpy() for batch in held])
                size = len(rows_NE)
                found_ANE[number, first : first + size] = rows_NE
                progress(first * len(own) + (number + 1) * size, count * len(own))
            first += size
        return np.broadcast_to(found_ANE, (len(alphas), *found_ANE.shape[1:]))

    def _block(self, tower: str) -> int:
        module = getattr(self.embedder.model, tower)
        block = first_block(self.embedder.model, tower, self._ends)
        whole = isinstance(module, PretrainedTower) and block < module.depth and not module.divides(block)
        return 0 if whole else block


def check_same_form(start: Embedder, end: Embedder) -> None:
    """Raise RunError where two models have no values in between."""
    firsts, lasts = start.model.state_dict(), end.model.state_dict()
    for name in sorted(firsts.keys() | lasts.keys()):
        shapes = [tuple(state[name].shape) if name in state else None for state in (firsts, lasts)]
        if shapes[0] != shapes[1]:
            shown = [f"has shape {shape}" if shape is not None else "is missing" for shape in shapes]
            raise RunError(
                f"Start and end of the run cannot be mixed: {name} {shown[0]} in the start, {shown[1]} in the end."
            )
    if start.tokenizer.to_dict() != end.tokenizer.to_dict():
        raise RunError("Start and end of the run cannot be mixed: they read captions with different tokenizers.")


def _block(part: str) -> float:
    """The number of a block; the embedding is before all of them, the head behind."""
    if part == HEAD:
        return math.inf
    return 0 if part == EMBEDDING else int(part)
