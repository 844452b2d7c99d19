"""What opening a foreign network gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lapclip.data.tokenizers.tokenizer import Tokenizer
from lapclip.model.pretrained.spec import TowerSpec


@dataclass(frozen=True)
class Opened:
    """A foreign network and what comes with it."""

    backbone: nn.Module
    spec: TowerSpec
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that follow from it."""
    tokenizer: Tokenizer | None = None
