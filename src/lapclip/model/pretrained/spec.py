"""What is needed to build a foreign network again without its origin: kept beside a model's weights, as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

HUGGING_FACE, TIMM, FACTORY = "huggingface", "timm", "factory"


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """A foreign network, its pooling, and for text its padding."""

    kind: str
    name: str
    """How the user named it."""
    config: dict[str, Any] = field(default_factory=dict)
    """Hugging Face's own config.json; empty for other kinds."""
    pooling: str = "mean"
    """mean, first, last or max of its tokens."""
    unit_length: bool = False
    """Whether its features are brought to length one."""
    padding: int = 0
    """The token that is no part of a caption."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
