"""Images as numbers: how a model sees them, resized and normalised; and random crops and flips, a whole batch at once,
on the device.

Shapes: B batch, C colour channels, S image side. A box is left, top, width, height as shares of the image, and 1
where it is to be flipped, else 0.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lapclip.config import ModelConfig
from lapclip.data.decode import Decoded, decode, decode_open_image
from lapclip.errors import DataError, first_line
from lapclip.paths import read_bytes
from lapclip.seeding import generator

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
        return cls(
            shape.image_size, shape.interpolation, shape.resize, shape.crop_share, shape.colours
        )

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


def middle_square(image: str | os.PathLike | bytes | Image.Image, view: View | int) -> np.ndarray:
    """What a model sees of an image, from a path, bytes or as it is: its middle, uint8 of shape (side, side, 3)."""
    decoded, view = open_image(image), as_view(view)
    return view.finish(decoded, fit_image(decoded.image, view))


def open_image(image: str | os.PathLike | bytes | Image.Image) -> Decoded:
    """An image from a path, from the bytes of a file or as it is, upright and in RGB; its colour profile may be left
    for later."""
    named = image
    if isinstance(image, (bytes, Image.Image)):
        named = f"A file of {len(image):,} bytes" if isinstance(image, bytes) else "An open image"
    try:
        if isinstance(image, Image.Image):
            return decode_open_image(image)
        return decode(image if isinstance(image, bytes) else read_bytes(image), defer_profile=True)
    except FileNotFoundError:
        raise DataError(f"No such image: {image}.") from None
    except DataError as error:
        raise DataError(
            f"{named} cannot be read as an image: {error.message}.", hint=error.hint
        ) from None
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{named} cannot be read as an image: {first_line(error)}.") from None


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


def _resized(
    image: Image.Image, rows: int, columns: int, interpolation: str = "bicubic"
) -> np.ndarray:
    """Resized with antialiasing. Copies are numpy's, because torch's start threads of their own in each of ours."""
    pixels_HWC = torch.from_numpy(np.array(image))
    resized = F.interpolate(
        pixels_HWC.permute(2, 0, 1)[None], size=(rows, columns), mode=interpolation, antialias=True
    )
    return resized[0].permute(1, 2, 0).numpy()


def normalise(pixels_BSSC: Tensor, shape: ModelConfig) -> Tensor:
    """uint8 images, channels last, to what the image tower sees: float32, channels first, the model's own scale."""
    # A whole row at once: over three channels alone, a CPU takes forty times as long.
    rows_BSR = pixels_BSSC.flatten(2).to(torch.float32)
    mean_R, std_R = mean_and_std(
        shape.pixel_mean, shape.pixel_std, pixels_BSSC.shape[2], pixels_BSSC.device
    )
    return ((rows_BSR - mean_R) / std_R).view(pixels_BSSC.shape).permute(0, 3, 1, 2)


@cache
def mean_and_std(mean: str, std: str, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Those of a row of `width` pixels. Cached on the device: sending them each step would make it wait."""
    given = ([float(number) for number in text.split()] for text in (mean, std))
    # Kept for the whole process, so whatever a program has as its default precision at this moment must not count.
    first, second = (torch.tensor(numbers, dtype=torch.float32, device=device) for numbers in given)
    return (first * 255).repeat(width), (second * 255).repeat(width)


ASPECT = (3 / 4, 4 / 3)
"""Width to height of a crop."""
SIDES = re.compile(r"\b(left|right)(most|wards?|[- ]?hand(ed)?)?\b", re.IGNORECASE)


def names_sides(caption: str) -> bool:
    """Whether a caption would be wrong for the flipped image."""
    return bool(SIDES.search(caption))


def draw_boxes(
    sided_B: np.ndarray,
    aspects_B: np.ndarray,
    smallest: float,
    flip: float,
    draw: np.random.Generator,
    *,
    middle: float = 1.0,
) -> Tensor:
    """A random box for each image, at least `smallest` of its area where it is not too long for that.

    Seen at its own proportions, aspects_B, a box is at most 4:3; where nothing is cropped it is the middle square, or
    the share `middle` of that square's side.
    Flipped with probability `flip`, but never where the caption names a side.
    """
    count = len(sided_B)
    area, shape = np.ones(count), np.ones(count)
    if smallest < 1:
        area = draw.uniform(smallest, 1, count)
        narrow, wide = (
            np.maximum(ASPECT[0], area * aspects_B),
            np.minimum(ASPECT[1], aspects_B / area),
        )  # what fits
        drawn = np.exp(np.log(narrow) + draw.random(count) * (np.log(wide) - np.log(narrow)))
        shape = np.where(narrow < wide, drawn, np.clip(aspects_B, *ASPECT))
    squeezed = (
        shape / aspects_B
    )  # width to height of the box where images are squeezed into squares
    area = np.minimum(
        area, np.minimum(squeezed, 1 / squeezed)
    )  # larger would not fit into the image
    width, height = np.sqrt(area * squeezed), np.sqrt(area / squeezed)
    if smallest == 1:
        width, height = middle * width, middle * height
    across, down = draw.random((2, count)) if smallest < 1 else (0.5, 0.5)
    left, top = across * (1 - width), down * (1 - height)
    flipped = (draw.random(count) < flip) & ~sided_B
    return torch.from_numpy(
        np.stack([left, top, width, height, flipped], axis=1).astype(np.float32)
    )


def draw_views(
    sided_N: np.ndarray,
    aspects_N: np.ndarray,
    smallest: float,
    flip: float,
    views: int,
    seed: int,
    middle: float,
) -> np.ndarray:
    """Boxes through which each image is seen again and again, (views, N, 5). The first is the image as scored."""
    kinds = [(1.0, 0.0), *[(smallest, flip)] * (views - 1)]
    drawn = [
        draw_boxes(sided_N, aspects_N, *kind, generator(seed, "views", at), middle=middle)
        for at, kind in enumerate(kinds)
    ]
    return np.stack([boxes.numpy() for boxes in drawn])


def view(pixels_BCSS: Tensor, boxes_B5: Tensor | None, side: int) -> Tensor:
    """The boxes of the images at the size the model is to see; without boxes the whole images."""
    whole = pixels_BCSS.shape[-1]
    if boxes_B5 is None and side == whole:
        return pixels_BCSS
    finer = max(
        1, whole // side
    )  # samples a pixel is the mean of, so that details do not alias when images shrink
    if boxes_B5 is None and whole == finer * side:
        return F.avg_pool2d(pixels_BCSS, finer)
    if boxes_B5 is None:
        boxes_B5 = pixels_BCSS.new_tensor([0, 0, 1, 1, 0]).expand(len(pixels_BCSS), 5)
    left, top, width, height, flipped = boxes_B5.unbind(1)
    across = width * (1 - 2 * flipped)
    zero = torch.zeros_like(left)
    # From coordinates in the new image, -1 to 1, to those in the old one.
    rows = [[across, zero, 2 * left + width - 1], [zero, height, 2 * top + height - 1]]
    map_B23 = torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)
    grid = F.affine_grid(
        map_B23, [len(pixels_BCSS), 3, finer * side, finer * side], align_corners=False
    )
    fine = F.grid_sample(
        pixels_BCSS, grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    return F.avg_pool2d(fine, finer) if finer > 1 else fine
