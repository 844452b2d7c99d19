"""A folder of images of all kinds, indexed and served by the real command, with the library beside it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from lapclip.data.scenes import split_scenes
from lapclip.data.scenes.drawing import draw
from lapclip.searching.library import Library, open_library

from ..conftest import command
from ..served import Served, ending, start

DRAWN, COPIES = 24, 1500
BEGAN = 1_700_000_000
ODD = ['<img src=x onerror="window.hacked=1"><b>&amp;\'.png', "two\nlines.png", "%2e%2e#?.png"]
"""Names that markup, lines and addresses would make something else of."""


BROKEN = b"no \xff text.png"


@dataclass
class Album:
    """What is served, where it lies, and what it is asked through."""

    folder: Path
    data: Path
    model: Path
    library: Library
    served: Served

    def number(self, name: str) -> int:
        """The number of an image."""
        every = self.library.newest(self.library.count)
        return next(hit.number for hit in every if hit.path.name == name)

    def restarted(self, *flags: str) -> Served:
        """Another server of the same index."""
        return serve(self.folder, self.data, self.model, *flags)


def serve(folder: Path, data: Path, model: Path, *flags: str) -> Served:
    arguments = command(
        "search", str(folder), "--model", str(model), "--web", "--port", "0", *flags
    )
    return start(arguments, LAPCLIP_DATA=str(data))


def scene(number: int, side: int = 96) -> Image.Image:
    return Image.fromarray(draw(split_scenes(DRAWN, seed=3)["train"][number % DRAWN], side, number))


def odd_names(folder: Path) -> list[str]:
    """Those of the odd names that this system allows."""
    made = []
    for at, name in enumerate(ODD):
        try:
            scene(at, 64).save(folder / name, "PNG")
        except OSError:  # Windows allows few of them
            continue
        made.append(name)
    return made


@contextmanager
def album(folder: Path, data: Path, model: Path, copies: int = 0) -> Iterator[Album]:
    """Drawn scenes, copies of them, and images that are odd in a way; the oddly named ones are the newest."""
    folder.mkdir()
    for number in range(DRAWN):
        scene(number).save(folder / f"scene {number}.{'jpg' if number % 2 else 'png'}")
    (folder / "more").mkdir()
    for number in range(copies):
        shutil.copyfile(
            folder / f"scene {number % DRAWN // 2 * 2}.png", folder / "more" / f"copy {number}.png"
        )
    upright = Image.new("RGB", (60, 40), "red")
    upright.paste("blue", (0, 0, 60, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    upright.save(folder / "turned.jpg", exif=exif, quality=95)
    scene(5).save(folder / "paper.tiff")
    scene(6, 700).save(folder / "large.png")
    with contextlib.suppress(OSError):  # not every system allows a name that is no text
        scene(7).save(os.path.join(os.fsencode(folder), BROKEN), "PNG")
    if importlib.util.find_spec("pillow_heif"):
        import pillow_heif

        pillow_heif.from_pillow(scene(1)).save(folder / "phone.heic", quality=90)
    for at, path in enumerate(sorted(folder.rglob("*.*"))):
        os.utime(path, (BEGAN + at, BEGAN + at))
    for at, name in enumerate(odd_names(folder)):
        os.utime(folder / name, (BEGAN, BEGAN + 10**7 - at))
    with pytest.MonkeyPatch.context() as patch, ending(serve(folder, data, model)) as served:
        patch.setenv("LAPCLIP_DATA", str(data))
        library = open_library(folder, str(model))
        yield Album(folder, data, model, library, served)
        library.close()
