"""From what a user names to a table of pictures and captions: the form is recognised, and what was guessed is said."""

from __future__ import annotations

from pathlib import Path

from lapclip.config import DataConfig
from lapclip.data.sources.columns import read_csv
from lapclip.data.table import Table
from lapclip.errors import DataError


def read_table(config: DataConfig) -> Table:
    """The pictures and captions of `config.source`."""
    path = Path(config.source)
    if not path.exists():
        raise DataError(f"There is no {config.source}.", hint="lapclip train, which draws its own pictures")
    return read_csv(path / "captions.csv" if path.is_dir() else path, config)
