"""What training on a data set will need of this machine, and whether it can work."""

from __future__ import annotations

from dataclasses import replace

from lapclip import __version__
from lapclip.config import Config
from lapclip.machine.measurement_cache import CacheFile
from lapclip.machine.timing import busy_cores

FEW, SOME, MANY = 1_000, 20_000, 1_000_000
PAIRS = 16
"""How many are timed where nothing was timed before."""


def store_bytes(training: int, held_out: int, side: int) -> int:
    """The packed store, a byte a colour of each pixel. Training images are kept larger than they are seen."""
    from lapclip.data.pixels import whole_side  # brings torch

    return 3 * (training * whole_side(side) ** 2 + held_out * side**2)


def epoch_seconds(config: Config, images: int, caption_tokens: int) -> tuple[float, str]:
    """Seconds of a pass over the training images, and where the figure comes from."""
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
    for number, part in ((1, share), (2, 1 - share)):
        times = [timed(lambda number=number: step(batch, number, 0.0, off)(), device.synchronise) for _ in range(3)]
        seconds += part * min(times[1:])  # the first one warms up
    return seconds / PAIRS, device.kind


def _tuned_step(config: Config) -> float | None:
    """A step's time, where `lapclip tune` or a run timed one of this model and batch."""
    notebook = CacheFile("tune.json")
    wanted = f"{config.model} batch {config.train.batch_size} captions of "
    try:
        pages = [
            page for key, page in notebook.entries().items() if key.startswith(wanted) and key.endswith(__version__)
        ]
        return float(pages[-1]["seconds_a_step"]) if pages else None
    except (KeyError, TypeError, ValueError):
        return None


def outlook(training: int, drawn: bool) -> str:
    """Whether training from nothing on so many images can work. The figures are measured ones."""
    if drawn:
        return "The built-in scenes are made for learning from nothing; a model learns them in minutes."
    pretrained = "Pretrained towers are the better way: lapclip train DATA --recipe heads."
    if training < FEW:
        return (
            f"{training:,} training images are too few to learn from nothing: the model will know them by heart, and "
            f"held-out scores will stay near chance. {pretrained}"
        )
    if training < SOME:
        return (
            f"{training:,} training images teach a little from nothing: Flickr8k's 6,000, with five captions each, "
            "gave a text-to-image R@10 of 0.26 over 1,000 images in 25 minutes on two cores (docs/photos.md), and "
            f"two small pretrained towers 0.63 in 7 (docs/finetune.md). {pretrained}"
        )
    if training < MANY:
        return (
            f"{training:,} training images are more than Flickr8k's 6,000, which gave a R@10 of 0.26 over 1,000 "
            f"images, and far fewer than published models saw. Expect modest scores. {pretrained}"
        )
    return (
        f"{training:,} training images can train a model from nothing. It stays far behind those that saw hundreds "
        "of millions: ViT-B/32 with 13 million samples seen had a Flickr30k R@1 of 0.014 to 0.029 (DataComp, small)."
    )
