"""How long an epoch will take: from steps that were timed before, or from a few pairs timed now."""

from __future__ import annotations

from dataclasses import replace

from lapclip import __version__
from lapclip.config import Config
from lapclip.machine.measurement_cache import CacheFile
from lapclip.machine.timing import busy_cores

PAIRS = 16
"""How many are timed where nothing was timed before."""


def epoch_seconds(config: Config, images: int, caption_tokens: int) -> tuple[float, str]:
    """Seconds of a pass over the training images, and where the number comes from."""
    tuned = _tuned_step(config)
    if tuned is not None:
        return images / config.train.batch_size * tuned, "from steps that were timed here before"
    busy = busy_cores()
    seconds, device = _timed_pair(config, caption_tokens)
    origin = f"from {PAIRS} pairs timed now on {device} in float32; {busy or 'lapclip tune times whole steps'}"
    return images * seconds, origin


def _timed_pair(config: Config, caption_tokens: int) -> tuple[float, str]:
    """Seconds a pair takes in training, and where: real steps of a few pairs, of each kind that the run would have."""
    import numpy as np

    from lapclip.data.batches import Batch
    from lapclip.machine.choose_device import available
    from lapclip.machine.timing import Stopwatch, timed
    from lapclip.model.clip import CLIP
    from lapclip.training.cuda_graph import make_step

    device = available(config.train.device)[0]
    # In a run of two steps whose first half is cheap, step 1 is of one kind and step 2 of the other.
    plain = {"dtype": "float32", "image_attention": "fused", "text_attention": "fused", "linear": "torch"}
    train = replace(config.train, **plain, compile="none", micro_batch=0, steps=2, cheap_share=0.5)
    step = make_step(CLIP(config.model).to(device.torch), train, device)
    side = config.model.image_size
    tokens_BL = np.zeros((PAIRS, caption_tokens), dtype=np.int64)
    tokens_BL[:, -1] = config.model.vocabulary - 1
    pixels = np.zeros((PAIRS, side, side, 3), np.uint8)
    batch = Batch(pixels, tokens_BL, np.eye(PAIRS, dtype=bool), np.zeros(PAIRS, dtype=bool))
    off = Stopwatch(device.synchronise, on=False)
    share = config.train.cheap_share if config.train.cheap_size or config.train.patch_dropout else 0.0
    seconds = 0.0
    for number, weight in ((1, share), (2, 1 - share)):
        times = [timed(lambda number=number: step(batch, number, 0.0, off)(), device.synchronise) for _ in range(3)]
        seconds += weight * min(times[1:])  # the first one warms up
    return seconds / PAIRS, device.kind


def _tuned_step(config: Config) -> float | None:
    """A step's time, where `lapclip tune` or a run timed one of this model and batch."""
    cache = CacheFile("tune.json")
    start = f"{config.model} batch {config.train.batch_size} captions of "
    try:
        pages = [page for key, page in cache.entries().items() if key.startswith(start) and key.endswith(__version__)]
        return float(pages[-1]["seconds_a_step"]) if pages else None
    except (KeyError, TypeError, ValueError):
        return None
