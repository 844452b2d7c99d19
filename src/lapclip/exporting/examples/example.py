"""Which caption fits an image best:

    python example.py image.jpg "a dog on a beach" "a red car"

Needs onnxruntime, numpy, Pillow and tokenizers, and nothing else. This file is an example: take what you need.
"""

import io
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageCms, ImageOps
from tokenizers import Tokenizer

HERE = Path(__file__).parent
ABOUT = json.loads((HERE / "lapclip.json").read_text(encoding="utf-8"))


def middle_square(path):
    """The middle of an image as the model sees it, uint8 of shape (side, side, 3). The model scales it itself."""
    about = ABOUT["preprocessing"]
    image = Image.open(path)
    profile = (
        image.info.get("icc_profile")
        if image.mode == "RGB" and about["colours"] == "srgb"
        else None
    )
    image = ImageOps.exif_transpose(image)
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    side, columns, rows = about["side"], about["resized"], about["resized"]
    if about["resize"] == "shortest":
        short = min(image.size)
        columns, rows = columns * image.width // short, rows * image.height // short
    image = image.resize((columns, rows), Image.Resampling[about["interpolation"].upper()])
    left, top = round((columns - side) / 2), round((rows - side) / 2)
    square = image.crop((left, top, left + side, top + side))
    if profile:  # colours last, as they were when the model learnt
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "srgb" not in ImageCms.getProfileDescription(source).lower():
            square = (
                ImageCms.profileToProfile(square, source, ImageCms.createProfile("sRGB")) or square
            )
    return np.asarray(square)


def tokens(captions):
    """Captions as rows of one length. One that is too long keeps its last token, the end."""
    about = ABOUT["tokenizer"]
    reader = Tokenizer.from_file(str(HERE / about["file"]))
    reader.no_padding()
    reader.no_truncation()
    rows, most = (
        [reader.encode(caption).ids or [about["end"]] for caption in captions],
        about["longest"],
    )
    rows = [row if len(row) <= most else [*row[: most - 1], row[-1]] for row in rows]
    length = about.get("filled_to") or max(2, *map(len, rows))
    return np.array(
        [row + [about["padding"]] * (length - len(row)) for row in rows], dtype=np.int64
    )


def embed(tower, inputs):
    """Unit-length rows, to be compared by their products."""
    about = ABOUT["towers"][tower]
    session = onnxruntime.InferenceSession(
        str(HERE / about["file"]), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {about["input"]: inputs})[0])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("python example.py IMAGE CAPTION [CAPTION ...]")
    image, *captions = sys.argv[1:]
    try:
        pixels = middle_square(image)
    except (
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:  # what Pillow raises
        sys.exit(f"{image} cannot be read as an image: {getattr(error, 'strerror', None) or error}")
    images_embedded = embed("image", pixels[None])
    captions_embedded = embed("text", tokens(captions))
    scores = (captions_embedded @ images_embedded[0]).tolist()
    for score, caption in sorted(zip(scores, captions, strict=True), reverse=True):
        print(f"{score:.4f}  {caption}")
