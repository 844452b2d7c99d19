"""What `lapclip data check` finds in a data set: what is odd, how often, where, and what is done with it or what to do.

First facts about captions: their scripts, what they cost in tokens, and the best scores that equal ones allow. Then one
pass over every image: its bytes are read once, in threads, and only a few facts of it are kept. Then the findings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import regex

from lapclip.config import BY_CONTENT, Config
from lapclip.data.copies import (
    SIGNATURE_SIDE,
    content_of,
    copy_keys,
    find_similar,
    groups,
    hash_and_thumbnail,
    signature_text,
)
from lapclip.data.decode import MARKS, NO_MEMORY, decode, read_header
from lapclip.data.loading import split_rule
from lapclip.data.packed_index import digest_of
from lapclip.data.table import Row, Skipped, StoredImage, Table, number_captions, reasons
from lapclip.data.tokenizers import CharacterTokenizer, Tokenizer
from lapclip.errors import DataError
from lapclip.machine.facts import logical_cores
from lapclip.progress import Progress
from lapclip.text import printable

SCRIPTS = (
    "Latin", "Han", "Hiragana", "Katakana", "Hangul", "Cyrillic", "Arabic", "Hebrew", "Greek", "Devanagari", "Bengali",
    "Tamil", "Telugu", "Thai", "Georgian", "Armenian", "Ethiopic", "Khmer", "Lao", "Myanmar", "Sinhala", "Gujarati",
    "Gurmukhi", "Kannada", "Malayalam", "Tibetan",
)  # fmt: skip
EMOJI = "emoji"


def count_scripts(captions: Sequence[str]) -> dict[str, list[int]]:
    """Which captions use which script, the most used first. A caption may use several."""
    found: dict[str, list[int]] = defaultdict(list)
    for at, caption in enumerate(captions):
        if caption.isascii():
            if any(letter.isalpha() for letter in caption):
                found["Latin"].append(at)
            continue
        for script in (*SCRIPTS, EMOJI):
            if _pattern(script).search(caption):
                found[script].append(at)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def tokens_per_character(
    script: str, captions: Sequence[str], tokenizer: Tokenizer, most: int = 200
) -> float:
    """What a letter of a script costs: tokens by letter, over the letters of that script in some of the captions."""
    letters = " ".join("".join(_runs(script).findall(caption)) for caption in captions[:most])
    count = sum(not letter.isspace() for letter in letters)
    return (tokenizer.length(letters) - 2) / count if count else 0.0


def unknown_characters(captions: Sequence[str], tokenizer: Tokenizer) -> Counter[str]:
    """Characters that the tokenizer cannot express, and how many captions have each. A BPE expresses all."""
    if not isinstance(tokenizer, CharacterTokenizer):
        return Counter()
    known = set(tokenizer.alphabet)
    return Counter(letter for caption in captions for letter in set(caption.lower()) - known)


def ceilings(
    contents: Sequence[Hashable],
    captions: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
    context: int,
) -> Any:
    """The best text-to-image and image-to-text R@1 that any model can reach among these images.

    Images with equal contents get the same vector, and so do captions with the same tokens: a search cannot tell
    them apart, and of those that tie only one comes first. `told_apart` is the share of images that have contents and
    a caption of their own.
    """
    rows = [
        [tuple(tokenizer.encode(caption, context)) for caption in options] for options in captions
    ]
    size = Counter(contents)
    owners: dict[tuple[int, ...], Counter[Hashable]] = defaultdict(Counter)
    for content, options in zip(contents, rows, strict=True):
        for tokens in options:
            owners[tokens][content] += 1
    queries = sum(counts.total() for counts in owners.values())
    # Text to image: a caption's first image can have one content; its copies come first by chance.
    found = sum(
        max(count / size[content] for content, count in counts.items())
        for counts in owners.values()
    )
    # Image to text: images of one content get one first caption, which other images may own as well.
    best: dict[Hashable, float] = defaultdict(float)
    for counts in owners.values():
        for content, count in counts.items():
            best[content] = max(best[content], count / counts.total())
    own = sum(
        size[content] == 1 and any(len(owners[tokens]) == 1 for tokens in options)
        for content, options in zip(contents, rows, strict=True)
    )
    images = max(1, len(contents))
    return {
        "t2i_r1": found / max(1, queries),
        "i2t_r1": sum(best.values()) / images,
        "told_apart": own / images,
    }


@cache
def _pattern(script: str) -> regex.Pattern[str]:
    return regex.compile(
        r"\p{Emoji_Presentation}" if script == EMOJI else rf"\p{{Script={script}}}"
    )


@cache
def _runs(script: str) -> regex.Pattern[str]:
    return regex.compile(_pattern(script).pattern + "+")


AT_ONCE = 512
"""Images handed to the threads at a time, so that progress is shown and an interrupt is heard."""


@dataclass(frozen=True)
class ImageFacts:
    """What is known of an image after the pass."""

    digest: str
    """Of its bytes."""
    size: int
    """Bytes of the file."""
    fault: str = ""
    """Why it cannot be read; then the rest is empty."""
    width: int = 0
    height: int = 0
    marks: frozenset[str] = frozenset()
    hash: int = 0
    thumbnail: bytes = b""
    content: str = ""
    """Of the image, whatever is written beside it in its file."""

    @property
    def signature(self) -> str:
        """The hash and the thumbnail as one text."""
        return signature_text(self.hash, self.thumbnail)


def inspect_image(data: bytes) -> ImageFacts:
    """Everything that is to be known about an image, from its bytes."""
    digest = digest_of(data)
    try:
        header = read_header(data)
        with header.turn(SIGNATURE_SIDE):
            decoded = decode(header, SIGNATURE_SIDE)
    except DataError as error:
        return ImageFacts(digest, len(data), fault=error.message)
    hashed, thumbnail = hash_and_thumbnail(decoded.image)
    marks, content = decoded.marks, content_of(data)
    return ImageFacts(
        digest, len(data), "", decoded.width, decoded.height, marks, hashed, thumbnail, content
    )


def inspect_images(
    images: Sequence[StoredImage], progress: Progress | None = None
) -> list[ImageFacts]:
    """The facts of every image, in order; those that cannot be read say why."""
    facts: list[ImageFacts] = []
    with ThreadPoolExecutor(logical_cores(), thread_name_prefix="lapclip-check") as pool:
        for at in range(0, len(images), AT_ONCE):
            facts += pool.map(_read, images[at : at + AT_ONCE])
            if progress:
                progress(len(facts), len(images))
    return facts


def _read(image: StoredImage) -> ImageFacts:
    try:
        return inspect_image(image.read())
    except MemoryError:
        return ImageFacts("", 0, fault=NO_MEMORY)
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        return ImageFacts("", 0, fault=why[:1].lower() + why[1:])


ALARM, WARNING, NOTE = "alarm", "warning", "note"
SEVERITIES = (ALARM, WARNING, NOTE)
EXAMPLES = 5
EARLY = "it ends early"
COSTLY = 1.5
"""Tokens a letter from which on a script is called costly; English takes about a quarter of one."""


@dataclass(frozen=True)
class Finding:
    """One kind of thing that is odd."""

    kind: str
    severity: str
    count: int
    examples: list[str]
    title: str
    """What was found, to follow the count: for one and, after a bar, for several."""
    advice: str
    """What is done with it, or what to do."""
    reasons: dict[str, int] = field(default_factory=dict)
    """How many there are for each reason, where there are several kinds of it."""

    def to_dict(self) -> dict[str, Any]:
        """For scripts."""
        one, _, several = self.title.partition("|")
        return {
            "kind": self.kind,
            "severity": self.severity,
            "count": self.count,
            "title": one if self.count == 1 else several,
            "advice": self.advice,
            "examples": self.examples,
            **({"reasons": self.reasons} if self.reasons else {}),
        }


def find_all(
    table: Table,
    splits: Sequence[str],
    inspected: Sequence[ImageFacts],
    tokenizer: Tokenizer,
    config: Config,
    belong: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Everything that was found, the gravest first. `belong` says whether captions belong to their images, if that was
    looked at."""
    rows = table.rows
    names = [printable(row.image.name) for row in rows]
    all_drawn = not any(row.split for row in rows) and split_rule(config.data) == BY_CONTENT
    found = [
        *_broken(table, names, inspected, config.data.broken_share),
        *_copies(names, splits, inspected, drawn=all_drawn),
        *_captions(rows, table.repeated, tokenizer, config.model.context),
        *(_belonging(rows, names, belong) if belong else ()),
        *_scripts(rows, tokenizer),
        *_marks(names, inspected, config.model.image_size),
    ]
    return sorted(
        (each for each in found if each.count),
        key=lambda each: (SEVERITIES.index(each.severity), -each.count),
    )


def _broken(
    table: Table, names: Sequence[str], inspected: Sequence[ImageFacts], share: float
) -> Iterable[Finding]:
    broken = [
        (name, facts.fault) for name, facts in zip(names, inspected, strict=True) if facts.fault
    ]
    too_many, too_many_rows = table.too_broken(len(broken), share)
    grave = ALARM if too_many else WARNING
    needed = f", and here it would take data.broken_share={table.share_needed(len(broken)):g}"
    limit = f"left out; training refuses to start above {share:.0%} (data.broken_share)"
    what = limit + needed * too_many
    early = [name for name, fault in broken if fault == EARLY]
    other = [Skipped(name, fault) for name, fault in broken if fault != EARLY]
    yield Finding(
        "unreadable", grave, len(other), _by_reason(other), "image cannot be read|images cannot be read", what,
        _counts(other),
    )  # fmt: skip
    yield Finding(
        "truncated", grave, len(early), early[:EXAMPLES], "image ends early|images end early", what
    )
    yield Finding(
        "skipped_rows",
        ALARM if too_many_rows else WARNING,
        len(table.skipped),
        _by_reason(table.skipped),
        "entry of the data is not used|entries of the data are not used",
        limit + needed * too_many_rows,
        _counts(table.skipped),
    )


def _by_reason(skipped: Sequence[Skipped]) -> list[str]:
    """An example of each reason, the commonest first, with how many there are."""
    found = reasons(skipped)
    if len(found) == 1:
        return [f"{each.where}: {each.why}" for each in skipped[:EXAMPLES]]
    return [f"{places[0]}: {why} ({len(places):,} of them)" for why, places in found.items()][
        :EXAMPLES
    ]


def _counts(skipped: Sequence[Skipped]) -> dict[str, int]:
    return {why: len(places) for why, places in reasons(skipped).items()}


def _copies(
    names: Sequence[str], splits: Sequence[str], inspected: Sequence[ImageFacts], *, drawn: bool
) -> Iterable[Finding]:
    same: dict[str, list[int]] = defaultdict(list)
    usable = [at for at, facts in enumerate(inspected) if not facts.fault]
    for at in usable:
        same[inspected[at].content].append(at)
    exact = [members for members in same.values() if len(members) > 1]
    firsts = [members[0] for members in same.values()]
    pairs = find_similar(
        [inspected[at].hash for at in firsts], [inspected[at].thumbnail for at in firsts]
    )
    near = groups([(firsts[a], firsts[b]) for a, b in pairs])
    yield Finding(
        "duplicate_images", WARNING, sum(len(members) - 1 for members in exact), _examples(exact, names),
        "image is an exact copy of another|images are exact copies of others",
        "kept; one of each is enough, so give it all the captions",
    )  # fmt: skip
    yield Finding(
        "near_duplicate_images", NOTE, sum(len(members) - 1 for members in near), _examples(near, names),
        "image looks like another|images look like others", "kept; fine within one split, if their captions differ",
    )  # fmt: skip
    keys = copy_keys(
        [inspected[at].content for at in usable], [inspected[at].signature for at in usable]
    )
    by_key: dict[str, list[int]] = defaultdict(list)
    for at, key in zip(usable, keys, strict=True):
        by_key[key].append(at)
    whole = [members for members in by_key.values() if len(members) > 1]
    kept = whole if drawn else []
    yield Finding(
        "copies_on_one_side", NOTE, sum(map(len, kept)), _examples(kept, names),
        "image has a copy, exact or near|images have a copy, exact or near",
        "each is in one split with its copies: splits are drawn by content",
    )  # fmt: skip
    across = [members for members in whole if len({splits[at] for at in members}) > 1]
    shown = [
        " = ".join(f"{names[at]} ({splits[at]})" for at in members) for members in across[:EXAMPLES]
    ]
    yield Finding(
        "image_in_two_splits", ALARM, len(across), shown,
        "image is in two splits, exactly or nearly|images are in two splits, exactly or nearly",
        "scores come out too good: take them out of one of the splits",
    )  # fmt: skip


def _captions(
    rows: Sequence[Row], repeated: int, tokenizer: Tokenizer, context: int
) -> Iterable[Finding]:
    images = Counter(caption for row in rows for caption in set(row.captions))
    shared = [
        (caption, count) for caption, count in images.most_common() if count > 1 and caption.strip()
    ]
    yield Finding(
        "duplicate_captions", NOTE, sum(count for _, count in shared),
        [f"{caption} ({count} images)" for caption, count in shared[:EXAMPLES]],
        "caption is the same as another image's|captions are the same as another image's",
        "kept; they count as right answers for each other in training, and cap the scores (ceiling)",
    )  # fmt: skip
    yield Finding(
        "repeated_captions", NOTE, repeated, [],
        "caption comes twice with one image|captions come twice with one image", "kept once",
    )  # fmt: skip
    long = [
        caption for row in rows for caption in row.captions if tokenizer.length(caption) > context
    ]
    total = sum(len(row.captions) for row in rows)
    yield Finding(
        "captions_cut", WARNING if len(long) > 0.05 * total else NOTE, len(long),
        [each[:80] for each in long[:EXAMPLES]],
        f"caption is longer than {context} tokens|captions are longer than {context} tokens",
        "cut at the end; --set model.context=N reads more",
    )  # fmt: skip
    numbers = number_captions(rows)
    yield Finding(
        "number_captions", WARNING if len(numbers) > 0.5 * total else NOTE, len(numbers),
        numbers[:EXAMPLES],
        "caption is a number|captions are numbers",
        "kept; a number says little about an image; --set data.caption_column=NAME chooses another column",
    )  # fmt: skip
    letters = unknown_characters([caption for row in rows for caption in row.captions], tokenizer)
    yield Finding(
        "unknown_characters", WARNING, len(letters),
        [f"{letter} (in {count:,} captions)" for letter, count in letters.most_common(EXAMPLES)],
        "character is not in the training captions|characters are not in the training captions",
        "all read as one unknown token; --set data.tokenizer=bpe reads them",
    )  # fmt: skip


def _belonging(
    rows: Sequence[Row], names: Sequence[str], belong: Mapping[str, Any]
) -> Iterable[Finding]:
    count = sum(len(row.captions) for row in rows)
    seen = f"by {belong['images']:,} images through {' and '.join(belong['by'])}"
    shown = [
        f"{name}: {row.captions[0]}" for name, row in zip(names, rows, strict=True) if row.captions
    ][:EXAMPLES]
    if belong["moved"]:
        whose = "before" if belong["moved"] > 0 else "after"
        one = f"caption seems to have moved by one row: it fits the image {whose} its own"
        several = f"captions seem to have moved by one row: they fit the images {whose} their own"
        advice = f"{seen}; look for a line too many or too few at the top of the table, and compare with the images"
        yield Finding("captions_moved", ALARM, count, shown, f"{one}|{several}", advice)
    elif belong["unrelated"]:
        yield Finding(
            "captions_unrelated", ALARM, count, shown,
            "caption has nothing to do with its image|captions have no more to do with their images than shuffled ones",
            f"{seen}; compare some with their images, or are they in words that {belong['by'][1]} cannot know?",
        )  # fmt: skip


def _scripts(rows: Sequence[Row], tokenizer: Tokenizer) -> Iterable[Finding]:
    captions = [caption for row in rows for caption in row.captions]
    for script, members in count_scripts(captions).items():
        texts = [captions[at] for at in members]
        cost = tokens_per_character(script, texts, tokenizer)
        if script == "Latin" or (script == EMOJI and len(texts) < 0.01 * len(captions)):
            continue
        costly = cost >= COSTLY and tokenizer.to_dict()["kind"] not in ("characters", "foreign")
        yield Finding(
            "script", WARNING if costly else NOTE, len(texts), [text[:60] for text in texts[:EXAMPLES]],
            f"caption uses {script}|captions use {script}",
            f"the tokenizer writes it with {cost:.1f} tokens a character"
            + ("; --set data.tokenizer=bpe learns shorter ones" if costly else ""),
        )  # fmt: skip


def _marks(names: Sequence[str], inspected: Sequence[ImageFacts], side: int) -> Iterable[Finding]:
    for mark, done in MARKS.items():
        marked = [name for name, facts in zip(names, inspected, strict=True) if mark in facts.marks]
        yield Finding(
            mark,
            WARNING if mark == "tiny" else NOTE,
            len(marked),
            marked[:EXAMPLES],
            _mark_title(mark),
            done,
        )
    small = [
        f"{name} ({facts.width} x {facts.height})"
        for name, facts in zip(names, inspected, strict=True)
        if not facts.fault and "tiny" not in facts.marks and min(facts.width, facts.height) < side
    ]
    yield Finding(
        "small",
        NOTE,
        len(small),
        small[:EXAMPLES],
        f"image is smaller than {side} pixels|images are smaller than {side} pixels",
        "enlarged",
    )


_MARKED = {
    "animated": "animated",
    "cmyk": "in printing colours (CMYK)",
    "grey": "grey",
    "huge": "huge, over 50 megapixels",
    "profile": "in the colours of an embedded profile",
    "profile_ignored": "marked with a damaged colour profile",
    "rotated": "stored turned (EXIF)",
    "sixteen_bit": "of 16 bits a colour",
    "tiny": "tiny, under 8 pixels",
    "transparent": "transparent in places",
}


def _mark_title(mark: str) -> str:
    what = _MARKED.get(mark, mark)
    return f"image is {what}|images are {what}"


def _examples(members: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    return [" = ".join(names[at] for at in group) for group in members[:EXAMPLES]]
