"""What training on a data set will need of this machine, and whether it can work."""

from __future__ import annotations

from lapclip import __version__
from lapclip.config import Config
from lapclip.machine.notebook import Notebook

FEW, SOME, MANY = 1_000, 20_000, 1_000_000


def store_bytes(training: int, held_out: int, side: int) -> int:
    """The packed store, a byte a colour of each pixel. Training pictures are kept larger than they are seen."""
    from lapclip.data.pixels import whole_side  # brings torch

    return 3 * (training * whole_side(side) ** 2 + held_out * side**2)


def epoch_seconds(config: Config, pictures: int, caption_symbols: int) -> tuple[float, str]:
    """Seconds of a pass over the training pictures, and where the figure comes from."""
    batch = min(config.train.batch_size, max(2, pictures))
    steps = pictures / batch
    tuned = _tuned_step(config)
    if tuned is not None:
        return steps * tuned, "from steps that were timed here before"
    from lapclip.machine import devices
    from lapclip.machine.devices import DTYPES
    from lapclip.tune.arithmetic import operations, quick_rate, step_products

    device = devices.available(config.train.device)[0]
    products = step_products(config.model, batch, caption_symbols)
    rate = quick_rate(products, device.torch, DTYPES["float32"], device.synchronise)
    seconds = steps * operations(products) / rate
    return seconds, f"an estimate from matrix products timed now on {device.kind} in float32; lapclip tune measures it"


def _tuned_step(config: Config) -> float | None:
    """A step's time, where `lapclip tune` or a run timed one of this model and batch."""
    notebook = Notebook("tune.json")
    wanted = f"{config.model} batch {config.train.batch_size} captions of "
    try:
        pages = [page for key, page in notebook.pages().items() if key.startswith(wanted) and key.endswith(__version__)]
        return float(pages[-1]["seconds_a_step"]) if pages else None
    except (KeyError, TypeError, ValueError):
        return None


def outlook(training: int, drawn: bool) -> str:
    """Whether training from nothing on so many pictures can work. The figures are measured ones."""
    if drawn:
        return "The built-in scenes are made for learning from nothing; a model learns them in minutes."
    pretrained = "Pretrained towers are the better way; lapclip does not load them yet."
    if training < FEW:
        return (
            f"{training:,} training pictures are too few to learn from nothing: the model will know them by heart, and "
            f"held-out scores will stay near chance. {pretrained}"
        )
    if training < SOME:
        return (
            f"{training:,} training pictures teach a little from nothing: Flickr8k's 6,000, with five captions each, "
            "gave a text-to-image R@10 of 0.26 over 1,000 pictures in 25 minutes on two cores (docs/photos.md), and "
            f"two small pretrained towers 0.45. {pretrained}"
        )
    if training < MANY:
        return (
            f"{training:,} training pictures are more than Flickr8k's 6,000, which gave a R@10 of 0.26 over 1,000 "
            f"pictures, and far fewer than published models saw. Expect modest scores. {pretrained}"
        )
    return (
        f"{training:,} training pictures can train a model from nothing. It stays far behind those that saw hundreds "
        "of millions: ViT-B/32 with 13 million samples seen had a Flickr30k R@1 of 0.014 to 0.029 (DataComp, small)."
    )
