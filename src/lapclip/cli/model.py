"""`lapclip model`."""

from __future__ import annotations

from dataclasses import asdict

from lapclip.cli.output import Common, emit, typed


def model(name: str, /, *, common: Common | None = None) -> int:
    """Show the shape of a named model and count its parameters.

    For example:

    - `lapclip model seed`
    - `lapclip model vit-b-32 --json`

    Parameters
    ----------
    name
        mini, tiny, photos, photos-large, seed, seed-as-written, vit-b-32, vit-b-16, siglip-base-patch16-224,
        siglip-so400m-patch14-384, siglip2-base-patch16-224, siglip2-base-patch32-256 or towers (two pretrained ones).
    """
    import torch

    from lapclip.model.clip import CLIP, count_parameters
    from lapclip.model.shapes import named_shape
    from lapclip.training.initial_weights import open_towers

    shape = named_shape(name)
    if shape.image_from or shape.text_from:
        built = open_towers(shape)[0]
    else:
        with torch.device("meta"):  # counts without filling memory
            built = CLIP(shape)
    counts = {
        "parameters": count_parameters(built),
        "image_parameters": count_parameters(built.image),
        "text_parameters": count_parameters(built.text),
    }
    lines = [f"[bold]{name}[/bold]  {counts['parameters']:,} parameters"]
    lines += [f"  {what:<18}{counts[f'{what}_parameters']:>14,}" for what in ("image", "text")]
    lines += [
        f"  {field:<18}{value:>14,}" for field, value in asdict(shape).items() if isinstance(value, int) and value
    ]
    how = {"mini": "train", "tiny": "train --set model.name=tiny", "seed": "train --recipe seed"}
    emit({"name": name, **counts}, [*lines, f"Next: {typed(how.get(name, 'model mini'))}"], common)
    return 0
