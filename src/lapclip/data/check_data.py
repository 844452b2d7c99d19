"""What `lapclip data check` finds in a data set: what is odd, how often, where, and what is done with it or what to do.

First the best scores that equal captions allow. Then one pass over every image: its bytes are read once, in threads, and
only a few facts of it are kept. Then the findings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import regex

from lapclip.config import Config
from lapclip.data.copies import (
    SIGNATURE_SIDE,
    content_of,
    copy_keys,
    find_similar,
    groups,
    hash_and_thumbnail,
    signature_text,
)
from lapclip.data.decode import NO_MEMORY, decode, decoding_threads
from lapclip.data.find_images import is_file_name
from lapclip.data.packed_index import digest_of
from lapclip.data.table import Skipped, StoredImage, Table, is_number, reasons
from lapclip.data.tokenizers import CharacterTokenizer, Tokenizer
from lapclip.errors import DataError
from lapclip.progress import Progress
from lapclip.text import printable

_LATIN = regex.compile(r"\p{Script=Latin}")


def count_latin(captions: Sequence[str]) -> int:
    """Return how many captions have Latin letters."""
    return sum(_LATIN.search(caption) is not None for caption in captions)


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
) -> dict[str, float]:
    """Return the best text-to-image and image-to-text R@1 that any model can reach among these images.

    Images with equal contents get the same vector, and so do captions with the same tokens. A search cannot tell them
    apart, and of those that tie only one comes first.
    """
    size = Counter(contents)
    owners: dict[tuple[int, ...], Counter[Hashable]] = defaultdict(Counter)
    for content, options in zip(contents, captions, strict=True):
        for caption in options:
            owners[tuple(tokenizer.encode(caption, context))][content] += 1
    # Text to image: a caption's first image can have one content; its copies come first by chance.
    found = 0.0
    # Image to text: images of one content get one first caption, which other images may own as well.
    best: dict[Hashable, float] = defaultdict(float)
    for counts in owners.values():
        found += max(count / size[content] for content, count in counts.items())
        for content, count in counts.items():
            best[content] = max(best[content], count / counts.total())
    queries = sum(counts.total() for counts in owners.values())
    return {
        "t2i_r1": found / max(1, queries),
        "i2t_r1": sum(best.values()) / max(1, len(contents)),
    }


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
        decoded = decode(data, SIGNATURE_SIDE)
    except DataError as error:
        return ImageFacts(digest, len(data), fault=error.message)
    hashed, thumbnail = hash_and_thumbnail(decoded.image)
    return ImageFacts(
        digest, len(data), "", decoded.width, decoded.height, hashed, thumbnail, content_of(data)
    )


def inspect_images(
    images: Sequence[StoredImage], progress: Progress | None = None
) -> list[ImageFacts]:
    """The facts of every image, in order; those that cannot be read say why."""
    facts: list[ImageFacts] = []
    for at in range(0, len(images), AT_ONCE):
        facts += decoding_threads().map(_read, images[at : at + AT_ONCE])
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
MAX_EXAMPLES = 5
ENDS_EARLY = "it ends early"
PAGE_HINT = "--page FILE shows some"


@dataclass(frozen=True)
class Example:
    """One case of a finding."""

    text: str
    rows: Sequence[int] = ()
    """Rows of the table whose images show the case."""


@dataclass(frozen=True)
class Finding:
    """One kind of oddity in a data set."""

    kind: str
    severity: str
    count: int
    examples: Sequence[Example]
    title: str
    """What was found, to follow the count: for one case and, after a bar, for several."""
    advice: str
    """What is done with it, or what to do."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Number of cases for each reason, if there are several reasons."""

    @property
    def heading(self) -> str:
        """The title for the count."""
        one, _, several = self.title.partition("|")
        return one if self.count == 1 else several

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as `data check --json` prints it."""
        values: dict[str, Any] = {
            "kind": self.kind,
            "severity": self.severity,
            "count": self.count,
            "title": self.heading,
            "advice": self.advice,
            "examples": [example.text for example in self.examples[:MAX_EXAMPLES]],
        }
        if self.reasons:
            values["reasons"] = self.reasons
        return values


@dataclass(frozen=True)
class CheckedData:
    """A data set after the pass over its images."""

    table: Table
    splits: Sequence[str]
    facts: Sequence[ImageFacts]
    tokenizer: Tokenizer
    config: Config

    @cached_property
    def names(self) -> list[str]:
        """The names of the images as they can be printed."""
        return [printable(row.image.name) for row in self.table.rows]

    @cached_property
    def captions(self) -> list[tuple[str, int]]:
        """Each caption with its row."""
        rows = self.table.rows
        return [(caption, index) for index, row in enumerate(rows) for caption in row.captions]

    @cached_property
    def usable(self) -> list[int]:
        """Rows whose images can be read."""
        return [index for index, facts in enumerate(self.facts) if not facts.fault]

    def caption_examples(self, matches: Callable[[str], bool], length: int) -> list[Example]:
        """Return the captions that match, cut to a length."""
        return [Example(text[:length], [row]) for text, row in self.captions if matches(text)]

    def copy_examples(self, copies: Iterable[Sequence[int]], *, with_split: bool) -> list[Example]:
        """Return an example for each group of copies."""
        examples = []
        for rows in copies:
            names = [self.names[row] for row in rows]
            if with_split:
                names = [f"{self.names[row]} ({self.splits[row]})" for row in rows]
            examples.append(Example(" = ".join(names), rows))
        return examples


def find_all(data: CheckedData, belonging: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return all findings, the gravest first.

    `belonging` is the result of `check_belonging`, or None if it was not measured.
    """
    findings = [
        *find_unusable(data),
        *find_copies(data),
        *find_odd_captions(data),
        find_small(data),
    ]
    if belonging:
        findings += find_mismatch(data, belonging)
    findings = [finding for finding in findings if finding.count]
    findings.sort(key=lambda finding: (SEVERITIES.index(finding.severity), -finding.count))
    return findings


def find_unusable(data: CheckedData) -> list[Finding]:
    """Find images that cannot be read and entries that cannot be used. Training leaves both out."""
    unreadable = []
    truncated = []
    for name, facts in zip(data.names, data.facts, strict=True):
        if facts.fault == ENDS_EARLY:
            truncated.append(Example(name))
        elif facts.fault:
            unreadable.append(Skipped(name, facts.fault))

    limit = data.config.data.broken_share
    broken_count = len(unreadable) + len(truncated)
    too_many_images, too_many_rows = data.table.too_broken(broken_count, limit)
    advice = f"left out; training refuses to start above {limit:.0%} (data.broken_share)"
    needed_share = data.table.share_needed(broken_count)
    refusal = f"{advice}, and here it would take data.broken_share={needed_share:g}"
    image_severity, image_advice = WARNING, advice
    if too_many_images:
        image_severity, image_advice = ALARM, refusal
    row_severity, row_advice = WARNING, advice
    if too_many_rows:
        row_severity, row_advice = ALARM, refusal

    skipped = data.table.skipped
    return [
        Finding(
            "unreadable", image_severity, len(unreadable), examples_by_reason(unreadable),
            "image cannot be read|images cannot be read", image_advice, count_reasons(unreadable),
        ),
        Finding(
            "truncated", image_severity, len(truncated), truncated,
            "image ends early|images end early", image_advice,
        ),
        Finding(
            "skipped_rows", row_severity, len(skipped), examples_by_reason(skipped),
            "entry of the data is not used|entries of the data are not used", row_advice,
            count_reasons(skipped),
        ),
    ]  # fmt: skip


def examples_by_reason(skipped: Sequence[Skipped]) -> list[Example]:
    """Return an example of each reason with its count, the most common first, or several of the only reason."""
    places_by_reason = reasons(skipped)
    if len(places_by_reason) == 1:
        return [Example(f"{one.where}: {one.why}") for one in skipped[:MAX_EXAMPLES]]
    return [
        Example(f"{places[0]}: {why} ({len(places):,} of them)")
        for why, places in places_by_reason.items()
    ]


def count_reasons(skipped: Sequence[Skipped]) -> dict[str, int]:
    """Return how many entries were left out for each reason."""
    return {why: len(places) for why, places in reasons(skipped).items()}


def find_copies(data: CheckedData) -> list[Finding]:
    """Find images that are copies of others, exactly or nearly, and those of them in two splits."""
    contents = [data.facts[row].content for row in data.usable]
    signatures = [data.facts[row].signature for row in data.usable]
    equal = group_by(contents, data.usable)
    exact = [rows for rows in equal if len(rows) > 1]
    firsts = [data.facts[rows[0]] for rows in equal]
    alike = find_similar([facts.hash for facts in firsts], [facts.thumbnail for facts in firsts])
    near = groups([(equal[one][0], equal[other][0]) for one, other in alike])
    copies = [
        rows for rows in group_by(copy_keys(contents, signatures), data.usable) if len(rows) > 1
    ]
    across = [rows for rows in copies if len({data.splits[row] for row in rows}) > 1]
    return [
        Finding(
            "duplicate_images", WARNING, sum(len(rows) - 1 for rows in exact),
            data.copy_examples(exact, with_split=False),
            "image is an exact copy of another|images are exact copies of others",
            "kept; one of each is enough, so give it all the captions",
        ),
        Finding(
            "near_duplicate_images", NOTE, sum(len(rows) - 1 for rows in near),
            data.copy_examples(near, with_split=False),
            "image looks like another|images look like others",
            "kept; fine within one split, if their captions differ",
        ),
        Finding(
            "image_in_two_splits", ALARM, len(across), data.copy_examples(across, with_split=True),
            "image is in two splits, exactly or nearly|images are in two splits, exactly or nearly",
            "scores come out too good: take them out of one of the splits",
        ),
    ]  # fmt: skip


def group_by(keys: Sequence[str], rows: Sequence[int]) -> list[list[int]]:
    """Return the rows of each key."""
    rows_by_key: dict[str, list[int]] = defaultdict(list)
    for key, row in zip(keys, rows, strict=True):
        rows_by_key[key].append(row)
    return list(rows_by_key.values())


def find_odd_captions(data: CheckedData) -> list[Finding]:
    """Find captions that are shared, repeated, too long, numbers, file names, or hold unknown characters."""
    context, total = data.config.model.context, len(data.captions)
    rows_by_caption: dict[str, list[int]] = defaultdict(list)
    for caption, row in data.captions:
        rows_by_caption[caption].append(row)
    shared = [(caption, rows) for caption, rows in rows_by_caption.items() if len(rows) > 1]
    shared.sort(key=lambda entry: -len(entry[1]))
    too_long = data.caption_examples(lambda text: data.tokenizer.length(text) > context, 80)
    numbers = data.caption_examples(is_number, 80)
    file_names = data.caption_examples(is_file_name, 80)
    letters = unknown_characters([caption for caption, _ in data.captions], data.tokenizer)
    return [
        Finding(
            "duplicate_captions", NOTE, sum(len(rows) for _, rows in shared),
            [Example(f"{caption} ({len(rows)} images)", rows) for caption, rows in shared[:MAX_EXAMPLES]],
            "caption is the same as another image's|captions are the same as another image's",
            "kept; they count as right answers for each other in training, and cap the scores (ceiling)",
        ),
        Finding(
            "repeated_captions", NOTE, data.table.repeated, [],
            "caption comes twice with one image|captions come twice with one image", "kept once",
        ),
        Finding(
            "captions_cut", WARNING if len(too_long) > 0.05 * total else NOTE, len(too_long), too_long,
            f"caption is longer than {context} tokens|captions are longer than {context} tokens",
            "cut at the end; --set model.context=N reads more",
        ),
        Finding(
            "number_captions", WARNING if len(numbers) > 0.5 * total else NOTE, len(numbers), numbers,
            "caption is a number|captions are numbers",
            "kept; a number says little about an image; --set data.caption_column=NAME chooses another column",
        ),
        Finding(
            "file_name_captions", WARNING if len(file_names) > 0.5 * total else NOTE,
            len(file_names), file_names,
            "caption is a file name|captions are file names",
            "kept; a file name says little about an image; --set data.caption_column=NAME chooses another column",
        ),
        Finding(
            "unknown_characters", WARNING, len(letters),
            [Example(f"{letter} (in {count:,} captions)") for letter, count in letters.most_common(MAX_EXAMPLES)],
            "character is not in the training captions|characters are not in the training captions",
            "all read as one unknown token; --set data.tokenizer=bpe reads them",
        ),
    ]  # fmt: skip


def find_mismatch(data: CheckedData, belonging: Mapping[str, Any]) -> list[Finding]:
    """Find captions that do not belong to their images."""
    count = len(data.captions)
    measured = f"by {belonging['images']:,} images through {' and '.join(belonging['by'])}"
    examples = []
    for index, row in enumerate(data.table.rows[:MAX_EXAMPLES]):
        examples.append(Example(f"{data.names[index]}: {row.captions[0]}", [index]))
    if belonging["unrelated"]:
        return [
            Finding(
                "captions_unrelated", ALARM, count, examples,
                "caption has nothing to do with its image|captions have no more to do with their images than shuffled ones",
                f"{measured}; compare some with their images ({PAGE_HINT}), or are they in words that "
                f"{belonging['by'][1]} cannot know?",
            )
        ]  # fmt: skip
    return []


def find_small(data: CheckedData) -> Finding:
    """Find images that are smaller than the model sees them."""
    side = data.config.model.image_size
    small = []
    for row in data.usable:
        facts = data.facts[row]
        if min(facts.width, facts.height) < side:
            small.append(Example(f"{data.names[row]} ({facts.width} x {facts.height})", [row]))
    title = f"image is smaller than {side} pixels|images are smaller than {side} pixels"
    return Finding("small", NOTE, len(small), small, title, "enlarged")
