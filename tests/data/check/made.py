"""A small data set with one of everything that is odd."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
from PIL import Image


def scene(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """A smooth image unlike those of other seeds."""
    blobs = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    return Image.fromarray(blobs).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def odd_images() -> dict[str, bytes]:
    """Files by name; `again` and `halved` show what `plain0` and `plain1` show."""
    plain = {f"plain{seed}.jpg": encoded(scene(seed), quality=90) for seed in range(6)}
    exif = Image.Exif()
    exif[0x0112] = 6
    clear = scene(20).convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    deep = Image.fromarray(np.asarray(scene(21).convert("L")).astype(np.uint16) * 257)
    return plain | {
        "again.jpg": plain["plain0.jpg"],
        "halved.jpg": encoded(scene(1).resize((80, 60)), quality=60),
        "early.jpg": plain["plain2.jpg"][: len(plain["plain2.jpg"]) // 2],
        "words.jpg": b"this is not an image",
        "print.jpg": encoded(scene(22).convert("CMYK")),
        "deep.png": encoded(deep, "PNG"),
        "clear.png": encoded(clear, "PNG"),
        "moving.gif": encoded(scene(23), "GIF", save_all=True, append_images=[scene(24)]),
        "turned.jpg": encoded(scene(25), exif=exif),
        "speck.png": encoded(scene(26, (4, 4)), "PNG"),
    }


def write_csv(folder: Path, images: dict[str, bytes], rows: list[tuple[str, str, str]]) -> Path:
    """A folder with its captions.csv; rows are name, caption and split."""
    for name, data in images.items():
        (folder / name).write_bytes(data)
    with open(folder / "captions.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "caption", "split"])
        writer.writerows(rows)
    return folder


def odd_folder(folder: Path) -> Path:
    """`again` and `plain3` are held out, the rest is for training."""
    images = odd_images()
    rows = [
        (
            name,
            f"the image {name.split('.')[0]}",
            "val" if name in ("again.jpg", "plain3.jpg") else "train",
        )
        for name in images
    ]
    rows += [("plain4.jpg", "a red bicycle", "train"), ("plain5.jpg", "a red bicycle", "train")]
    rows += [
        ("plain4.jpg", "一只红色的自行车", "train"),
        ("plain5.jpg", "very " * 90 + "long", "train"),
    ]
    return write_csv(folder, images, rows)
