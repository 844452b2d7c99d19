"""From what a user names to images and captions: one file a source, each of which registers itself."""

from __future__ import annotations

import importlib
import pkgutil

from lapclip.config import DataConfig
from lapclip.data.sources.files import FILES
from lapclip.data.sources.registry import BUILT_IN, Source, absolute
from lapclip.data.table import Table

__all__ = ["BUILT_IN", "Source", "absolute", "find_source", "read_table"]

for _found in pkgutil.iter_modules(
    __path__
):  # so that a new file here is all that a new source takes
    importlib.import_module(f"{__name__}.{_found.name}")


def find_source(name: str) -> Source:
    """The source that `data.source` names: a built-in one, or files."""
    return BUILT_IN.get(name, FILES)


def read_table(config: DataConfig) -> Table:
    """The images and captions of `config.source`. No image is opened; what is left out is counted and named."""
    return find_source(config.source).read_table(config)
