"""The columns that are chosen in a table of any names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lapclip.config import DataConfig
from lapclip.data.columns import Columns, NotATable, choose_columns
from lapclip.data.find_images import ImageFinder
from tests.data.sources.made import make_images


@pytest.fixture
def finder(tmp_path: Path) -> ImageFinder:
    return ImageFinder(make_images(tmp_path, "a.png", "b.png", "c.png", "1.png"))


def choose(text: str, finder: ImageFinder, **settings: Any) -> Columns:
    rows = [line.split("|") for line in text.splitlines()]
    return choose_columns(rows, [finder], DataConfig(**settings), "list.csv")


NUMBERED = "id|caption_1|caption_2|title\na.png|a dog|the dog|Rex"
CASES = {
    "usual names": ("note|text|image\nred|a dog|a.png\nred|a cat|b.png", "image", "text", ""),
    "the most usual name": ("path|image|title|caption\na.png|b.png|A|a dog", "image", "caption", ""),
    "a usual name without files": ("image|photo_of\nzebra|a.png\nhorse|b.png", "photo_of", "image", ""),
    "a usual name with files before other files": ("thumb|image|x\na.png|b.png|a dog", "image", "x", ""),
    "half of the files are missing": ("thumb|image|x\na.png|b.png|dog\nb.png|z.png|cat", "image", "x", ""),
    "names without endings": ("no|key|what\nr1|a|a dog\nr2|b|a cat", "key", "what", ""),
    "all files are missing": ("what|path\na dog|x.jpg\na cat|y.jpg", "path", "what", ""),
    "text with most distinct values": ("bild|art|satz\na.png|x|one\nb.png|x|two", "bild", "satz", ""),
    "the longest text of several": ("bild|nr|satz\na.png|k1|one dog\nb.png|k2|two dogs", "bild", "satz", ""),
    "no captions of numbers": ("image|caption|remark\na.png|1|a dog\nb.png|2|a cat", "image", "remark", ""),
    "captions of numbers alone": ("image|label|size\na.png|1|30\nb.png|2|40", "image", "label", ""),
    "addresses are no captions": ("image|link|remark\na.png|http://x/1|a dog", "image", "remark", ""),
    "captions that belong together": (NUMBERED, "id", "caption_1 caption_2", ""),
    "split by name": ("image|text|Set\na.png|a dog|train\nb.png|a cat|?\nc.png|x|dev", "image", "text", "Set"),
    "split by content": ("image|text|u\na.png|a dog|train\nb.png|a cat|dev\nc.png|x|dev", "image", "text", "u"),
    "no header": ("a.png|a dog\nb.png|a cat", "column1", "column2", ""),
}  # fmt: skip


@pytest.mark.parametrize(("text", "image", "captions", "split"), CASES.values(), ids=CASES)
def test_columns_by_name_then_by_content(
    text: str, image: str, captions: str, split: str, finder: ImageFinder
) -> None:
    used = choose(text, finder).used
    assert (used.images, " ".join(used.captions), used.split or "") == (image, captions, split)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("first|second\nred|a dog\nblue|a cat", "data.picture_column"),
        ("image|size\na.png|30\nb.png|40", "data.caption_column"),
    ],
)
def test_a_table_without_a_fitting_column_asks_which_one_it_is(
    text: str, setting: str, finder: ImageFinder
) -> None:
    with pytest.raises(NotATable) as caught:
        choose(text, finder)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 3
    assert "which column" in lines[0]
    assert all(name in lines[0] for name in text.splitlines()[0].split("|"))
    assert f"--set {setting}=NAME" in lines[1]


def test_the_settings_choose_any_column(finder: ImageFinder) -> None:
    text = "image|thumb|text|size\na.png|b.png|a dog|30\nb.png|c.png|a cat|40"
    used = choose(text, finder, picture_column="column2", caption_column="size, Text").used
    assert used.images == "thumb"
    assert used.captions == ("size", "text")
