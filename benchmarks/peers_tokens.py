"""Does CLIP's tokenizer here give OpenCLIP's ids? Run it in the peers' environment:

    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/peers_tokens.py flickr8k/captions.csv
    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/peers_tokens.py --write   # the table that the tests check

It compares real captions, the hard ones of tests/data/hard_captions.py, every assigned character between others, and
random strings of awkward pieces; then the time a batch of 256 takes. The last line is JSON.
"""

from __future__ import annotations

import csv
import json
import random
import statistics
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import openclip  # noqa: F401  (makes the peer importable beside a CPU torch)
from open_clip.tokenizer import SimpleTokenizer

from lapclip.data.tokenizers import clip_tokenizer

TESTS = Path(__file__).parents[1] / "tests" / "data"
sys.path.insert(0, str(TESTS))
from hard_captions import HARD  # noqa: E402

CONTEXT = 77
OURS, THEIRS = clip_tokenizer(), SimpleTokenizer()


def their_ids(caption: str) -> list[int]:
    """OpenCLIP's row without its padding, which is 0: as many tokens as the caption has, cut as OpenCLIP cuts."""
    length = min(CONTEXT, len(THEIRS.encode(caption)) + 2)
    return THEIRS([caption], CONTEXT)[0, :length].tolist()


def compare(what: str, captions: Iterable[str]) -> dict[str, int]:
    """How many captions there were and how many came out differently; those are shown."""
    compared = different = 0
    for caption in captions:
        compared += 1
        if OURS.encode(caption, CONTEXT) != their_ids(caption):
            different += 1
            if different <= 5:
                print(
                    f"  {caption!r}: {OURS.encode(caption, CONTEXT)} here, {their_ids(caption)} there"
                )
    print(f"{what}: {compared:,} compared, {different:,} different", flush=True)
    return {"compared": compared, "different": different}


def characters() -> Iterator[str]:
    """Each assigned character, alone and between letters, digits, marks and apostrophes; eight to a caption."""
    assigned = [
        chr(code)
        for code in range(0x110000)
        if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")
    ]
    # Han and Hangul are many and alike: a tenth of them will do.
    kept = [
        c
        for at, c in enumerate(assigned)
        if at % 10 == 0 or (not 0x3400 <= ord(c) < 0xD7A4 and ord(c) < 0x20000)
    ]
    for at in range(0, len(kept), 3):
        yield " ".join(f"a{c}b {c} !{c}1{c} '{c}" for c in kept[at : at + 3])


def awkward(count: int, seed: int = 0) -> Iterator[str]:
    """Random strings of pieces that mean something to one of the steps."""
    draw = random.Random(seed)
    pieces = [piece for caption in HARD for piece in caption.split(" ") if len(piece) < 30]
    pieces += [
        "&",
        "&amp;",
        "<",
        ">",
        "'",
        "'s",
        "_",
        "\u200d",
        "\ufe0f",
        "\u0301",
        "\n",
        " ",
        "\r",
        "\x00",
        "Ã©",
        "â€",
    ]
    for _ in range(count):
        parts = [
            draw.choice(pieces) if draw.random() < 0.8 else chr(draw.randrange(0x3000))
            for _ in range(8)
        ]
        yield draw.choice(["", " "]).join(parts)


def milliseconds(encode: Callable[[], object]) -> float:
    times = []
    for _ in range(15):
        began = time.perf_counter()
        encode()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def main(table: str) -> None:
    with open(table, encoding="utf-8", newline="") as file:
        real = [row["caption"] for row in csv.DictReader(file)]
    found = {
        "real": compare("real captions", real),
        "hard": compare("hard captions", HARD),
        "characters": compare("every assigned character", characters()),
        "awkward": compare("random awkward strings", awkward(20_000)),
    }
    batch = real[:256]
    ours, theirs = (
        milliseconds(lambda: OURS.batch(batch, CONTEXT)),
        milliseconds(lambda: THEIRS(batch, CONTEXT)),
    )
    print(
        f"a batch of 256 captions: {ours:.2f} ms, {theirs / ours:.1f}x OpenCLIP's {theirs:.2f} ms"
    )
    versions = {name: version(name) for name in ("open_clip_torch", "regex", "ftfy", "tokenizers")}
    print(json.dumps({**found, "ms_256": ours, "their_ms_256": theirs, **versions}))
    sys.exit(any(part["different"] for part in found.values()))


def write() -> None:
    """OpenCLIP's ids of the hard captions, for tests where there is no OpenCLIP."""
    rows = [json.dumps([caption, their_ids(caption)]) for caption in HARD]
    (TESTS / "clip_ids.json").write_text(
        "[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8", newline="\n"
    )
    print(f"{len(rows)} captions")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    elif len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        sys.exit(__doc__)
