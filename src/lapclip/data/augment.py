"""Random crops and flips, a whole batch at once, on the device.

Shapes: B batch, C colour channels, S image side. A box is left, top, width, height as shares of the image, and 1
where it is to be flipped, else 0.
"""

from __future__ import annotations

import re

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lapclip.seeding import generator

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
        narrow, wide = np.maximum(ASPECT[0], area * aspects_B), np.minimum(ASPECT[1], aspects_B / area)  # what fits
        drawn = np.exp(np.log(narrow) + draw.random(count) * (np.log(wide) - np.log(narrow)))
        shape = np.where(narrow < wide, drawn, np.clip(aspects_B, *ASPECT))
    squeezed = shape / aspects_B  # width to height of the box where images are squeezed into squares
    area = np.minimum(area, np.minimum(squeezed, 1 / squeezed))  # larger would not fit into the image
    width, height = np.sqrt(area * squeezed), np.sqrt(area / squeezed)
    if smallest == 1:
        width, height = middle * width, middle * height
    across, down = draw.random((2, count)) if smallest < 1 else (0.5, 0.5)
    left, top = across * (1 - width), down * (1 - height)
    flipped = (draw.random(count) < flip) & ~sided_B
    return torch.from_numpy(np.stack([left, top, width, height, flipped], axis=1).astype(np.float32))


def draw_views(
    sided_N: np.ndarray, aspects_N: np.ndarray, smallest: float, flip: float, views: int, seed: int, middle: float
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
    finer = max(1, whole // side)  # samples a pixel is the mean of, so that details do not alias when images shrink
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
    grid = F.affine_grid(map_B23, [len(pixels_BCSS), 3, finer * side, finer * side], align_corners=False)
    fine = F.grid_sample(pixels_BCSS, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return F.avg_pool2d(fine, finer) if finer > 1 else fine
