"""The built-in scenes as a source: small images that are drawn at the size a model sees, with their captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lapclip.config import DataConfig
from lapclip.data.sources.registry import Source, register

if TYPE_CHECKING:
    from lapclip.data.dataset import DataSet
    from lapclip.progress import DataProgress


@register
class Scenes(Source):
    """The procedural data that a first run learns from. It needs no files and no network."""

    name = "scenes"
    is_drawn = True
    title = "the built-in scenes"
    outlook = "The built-in scenes are made for learning from nothing; a model learns them in minutes."

    def what_changed(self, config: DataConfig) -> str:
        return "this lapclip draws other images"

    def draw(self, config: DataConfig, side: int, progress: DataProgress | None = None) -> DataSet:
        from lapclip.data.scenes.dataset import load_scenes  # brings torch

        return load_scenes(config, side, progress)

    def count_training(self, config: DataConfig) -> int:
        return config.train_pairs
