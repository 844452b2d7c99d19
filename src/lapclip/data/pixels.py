"""Images as numbers: how a model sees them, resized and normalised.

Shapes: B batch, C colour channels, S image side.
"""

from __future__ import annotations

import math
import os
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lapclip.config import ModelConfig
from lapclip.data.decode import Decoded, as_decoded, decode
from lapclip.errors import DataError, first_line
from lapclip.paths import read_bytes

RESIZING_VERSION = 1
"""Part of the key of packed stores: raise it with every change that resizes some image to other pixels."""
LONGEST = 32
"""Lengths to widths of an image beyond which its ends are cut off before its middle is enlarged."""


@dataclass(frozen=True)
class View:
    """How a model sees an image: as a square of so many pixels, resized and cut as CLIP does or otherwise."""

    side: int
    interpolation: str = "bicubic"
    resize: str = "shortest"
    crop_share: float = 1.0
    colours: str = "srgb"

    @classmethod
    def of(cls, shape: ModelConfig) -> View:
        """How a model of that shape sees images."""
        return cls(shape.image_size, shape.interpolation, shape.resize, shape.crop_share, shape.colours)

    @property
    def resized(self) -> int:
        """Side, or short side, of the image that the square is cut out of."""
        return int(self.side / self.crop_share + 1e-6)  # 224 / (224 / 248) is not to become 247

    @property
    def key(self) -> str:
        """What tells it from other views; for CLIP's own way the side alone."""
        usual = self == View(self.side)
        return f"{self.side}" if usual else " ".join(str(part) for part in astuple(self))

    def finish(self, decoded: Decoded, square: np.ndarray) -> np.ndarray:
        """A square of an image in the colours that the model is to see."""
        return decoded.finish(square) if self.colours == "srgb" else square


def as_view(view: View | int) -> View:
    """A view, given as it is or as a side that is seen as CLIP does."""
    return View(view) if isinstance(view, int) else view


def middle_square(image: str | os.PathLike | Image.Image, view: View | int) -> np.ndarray:
    """What a model sees of an image, from a path or as it is: its middle, uint8 of shape (side, side, 3)."""
    decoded, view = open_image(image), as_view(view)
    return view.finish(decoded, fit_image(decoded.image, view))


def open_image(image: str | os.PathLike | Image.Image) -> Decoded:
    """An image from a path or as it is, upright and in RGB; its colour profile may be left for later."""
    try:
        if isinstance(image, Image.Image):
            return as_decoded(image)
        return decode(read_bytes(image), put_off=True)
    except FileNotFoundError:
        raise DataError(f"No such image: {image}.") from None
    except DataError as error:
        raise DataError(f"{image} cannot be read as an image: {error.message}.", hint=error.hint) from None
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{image} cannot be read as an image: {first_line(error)}.") from None


def fit_image(image: Image.Image, view: View | int) -> np.ndarray:
    """The middle square of an image at the model's size, uint8 of shape (side, side, 3).

    Sizes are rounded as torchvision's Resize and CenterCrop do, through which published weights learnt to see.
    """
    view = as_view(view)
    side = view.side
    if image.size == (side, side) and view.resized == side:
        return np.asarray(image)
    rows = columns = view.resized
    if view.resize == "shortest":
        image = _without_ends(image)
        (width, height), short = image.size, min(image.size)
        rows, columns = rows * height // short, columns * width // short
    top, left = round((rows - side) / 2), round((columns - side) / 2)
    resized = _resized(image, rows, columns, view.interpolation)
    return np.ascontiguousarray(resized[top : top + side, left : left + side])


def squeeze_image(image: Image.Image, side: int) -> np.ndarray:
    """The whole of an image squeezed into a square, uint8 of shape (side, side, 3). Crops of it are widened again."""
    if image.size == (side, side):
        return np.asarray(image)
    return np.ascontiguousarray(_resized(image, side, side))


def whole_side(side: int) -> int:
    """The side of squeezed images for a model that sees `side` pixels.

    At least 8/7 of it, so that crops of three quarters of an image are sharp, and a multiple of 8.
    """
    return math.ceil(side / 7) * 8


def _without_ends(image: Image.Image) -> Image.Image:
    """A very long image without its ends: enlarged as a whole it would fill memory, and its middle is all we need."""
    (width, height), short = image.size, min(image.size)
    across, down = min(width, LONGEST * short), min(height, LONGEST * short)
    if (across, down) == image.size:
        return image
    left, top = (width - across) // 2, (height - down) // 2
    return image.crop((left, top, left + across, top + down))


def _resized(image: Image.Image, rows: int, columns: int, interpolation: str = "bicubic") -> np.ndarray:
    """Resized with antialiasing. Copies are numpy's, because torch's start threads of their own in each of ours."""
    pixels_HWC = torch.from_numpy(np.array(image))
    resized = F.interpolate(pixels_HWC.permute(2, 0, 1)[None], size=(rows, columns), mode=interpolation, antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def normalise(pixels_BSSC: Tensor, shape: ModelConfig) -> Tensor:
    """uint8 images, channels last, to what the image tower sees: float32, channels first, the model's own scale."""
    mean, std = _mean_and_std(shape.pixel_mean, shape.pixel_std, pixels_BSSC.device)
    return ((pixels_BSSC.to(torch.float32) - mean) / std).permute(0, 3, 1, 2)


@cache
def _mean_and_std(mean: str, std: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cached on the device: sending them each step would make it wait."""
    first, second = (torch.tensor([float(number) for number in text.split()], device=device) for text in (mean, std))
    return first * 255, second * 255
