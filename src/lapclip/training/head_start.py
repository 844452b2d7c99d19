"""Closed-form start of new heads: canonical correlation analysis (CCA) of the features of both
towers.

Shapes: F image features, G text features, E embedding, K its directions that CCA finds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lapclip.data.dataset import DataSet
from lapclip.evaluation.closed_form import fit_cca, normed
from lapclip.model.clip import CLIP
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.training.frozen_features import CachedFeatures

MAX_FITTED_IMAGES = 10_000  # more cost memory and change little
CORRELATION_POWER = 0.5  # weight of a direction by its correlation; 0 and 1 were a little worse
MIN_RELATIVE_LENGTH = 1e-2  # of a direction to the longest; few images determine few directions
RANDOM_SCALE = 0.1  # for the directions that CCA does not determine, which keep random values


@torch.no_grad()
def start_heads(model: CLIP, features: CachedFeatures | None, data: DataSet) -> bool:
    """Set the projections of both heads to the maps of CCA. Return whether that was possible.

    It is not possible if more than the heads of two pretrained towers learns. The hidden layers of
    heads start at zero in any case.
    """
    image_tower, text_tower = model.image, model.text
    if not isinstance(image_tower, PretrainedTower) or not isinstance(text_tower, PretrainedTower):
        return False
    pairs = None
    if features is not None:
        pairs = _sample_pairs(features, data)
    if pairs is None:
        return False
    maps = fit_cca(*pairs, width=model.shape.embedding, power=CORRELATION_POWER)
    is_known_E = _is_long(maps.image_FE) & _is_long(maps.text_GE)
    _set_projection(image_tower.head.projection, maps.image_FE[:, is_known_E])
    _set_projection(text_tower.head.projection, maps.text_GE[:, is_known_E])
    return True


def _is_long(map_FE: Tensor) -> Tensor:
    """Return which directions (columns) of a map are long enough to be more than noise."""
    lengths_E = map_FE.norm(dim=0)
    return lengths_E > MIN_RELATIVE_LENGTH * lengths_E.amax()


def _set_projection(projection_FE: Tensor, map_FK: Tensor) -> None:
    """Replace the first directions of a projection, and scale the others down."""
    count = map_FK.shape[1]
    # Scaled to the norm of random values, so that the learning rate fits.
    map_FK = map_FK * (count**0.5 / map_FK.norm())
    projection_FE.mul_(RANDOM_SCALE)
    projection_FE[:, :count] = map_FK.to(projection_FE)


def _sample_pairs(features: CachedFeatures, data: DataSet) -> tuple[Tensor, Tensor] | None:
    """Return normed features of training images, and the mean of their captions' normed features.

    Returns None if features are not those that heads take: one vector for each image and caption.
    """
    images, captions = features.images, features.captions
    if images is None or captions is None:
        return None
    if images.ndim != 3 or captions.first_N is not None:
        return None
    caption_counts = [len(options) for options in data.train.captions]
    first_captions = np.cumsum([0, *caption_counts])
    stride = -(-len(data.train) // MAX_FITTED_IMAGES)
    rows = []
    mean_captions = []
    for row in range(0, len(data.train), stride):
        own_captions = captions.values[first_captions[row] : first_captions[row + 1]]
        if len(own_captions):
            rows.append(row)
            mean_captions.append(normed(own_captions).mean(0))
    return normed(images[0][rows]), torch.stack(mean_captions)
