"""Whether the model learns, and learns what it should; and whether the pairs can teach, and tell, that."""

from __future__ import annotations

import math
import statistics
from typing import Any

from lapclip.config import DEFAULT_RECIPE, PHOTOS_RECIPE
from lapclip.runs.events import mapping
from lapclip.runs.findings.checks import (
    TOO_GENTLE,
    TOO_WILD,
    USUAL_RATE,
    Found,
    Surroundings,
    check,
    contrastive_loss,
    has_learnt_a_while,
    numbers,
    recent,
    validated,
)
from lapclip.runs.summary import Summary, batch_accuracy
from lapclip.runs.trend import (
    KNOWN_BY_HEART,
    LEAST_FALL,
    LEAST_RECALL_FALL,
    MIN_LATER_EVALUATIONS,
    Trend,
    score_name,
    validation,
)
from lapclip.text import interval, number, percent

STUCK = 0.97
"""Share of the loss of guessing, above which nothing has been learnt. A healthy run is below 0.9 after 40
steps."""
SAME = 0.1
"""Spread of the logits under which a softmax is as good as even: the odds of two answers differ by a tenth."""
WAYS = {"t2i": "text to image", "i2t": "image to text"}
HEADS = "heads"
AT_CHANCE_RANK, AT_CHANCE, ENOUGH_CANDIDATES = 10, "r10", 40
"""Guessing finds ten right answers among the first ten, however many candidates there are, give or take three: a model
that finds twice as many shows. Of fewer candidates than 40, ten are too large a share."""
BY_HEART = 4
"""Times the accuracy of guessing in training batches from which on the training pairs themselves are learnt."""
FEW_PAIRS, VERY_FEW_PAIRS = 32, 16
"""Pairs in a batch. With 16, a guess is right 6 times in 100 and most wrong answers are easy; with 32, 3 times."""


@check(
    "stuck-loss",
    "alarm",
    "The loss is that of guessing",
    f"the latest losses are above {STUCK:.0%} of the loss of guessing, after 30 steps and half of the warm-up",
)
def stuck_loss(summary: Summary, around: Surroundings) -> Found | None:
    losses = numbers(contrastive_loss(event) for event in recent(summary.steps))
    if not has_learnt_a_while(summary) or not summary.chance_loss or not losses:
        return None
    loss, guessing = statistics.median(losses), summary.chance_loss
    if loss < STUCK * guessing:
        return None
    rate = number(summary.setting("train", "learning_rate")) or 0.0
    evidence = (
        f"loss {loss:.2f} at step {summary.step:,}; guessing among {summary.batch_size} pairs gives {guessing:.2f}; "
        f"learning rate {rate:g}"
    )
    if rate < TOO_GENTLE:
        return Found(
            evidence,
            f"a higher learning rate: {around.train(f'train.learning_rate={USUAL_RATE:g}')}",
        )
    if rate > TOO_WILD:
        return Found(evidence, f"a lower learning rate: {around.train_gentler(summary)}")
    return Found(
        evidence,
        f"see that images and captions belong together; then {around.train_gentler(summary)}",
    )


@check(
    "at-chance",
    "alarm",
    "The model finds no more than guessing would",
    f"half of the steps are done, and the 95 % intervals of held-out R@{AT_CHANCE_RANK} reach down to chance both "
    f"ways, among {ENOUGH_CANDIDATES} candidates or more",
)
def at_chance(summary: Summary, around: Surroundings) -> Found | None:
    late = summary.total_steps and summary.step >= summary.total_steps / 2
    # The latest on val, and the finished model on pairs that chose nothing: the best of many may be best by luck.
    judged = [
        {"split": event.get("split"), **event["evaluation"]} for event in summary.evaluations[-1:]
    ]
    judged += [final] if (final := mapping(summary.ending.get("evaluation"))) else []
    judged = (
        [scores for scores in judged if _not_above_chance(scores) is not None] if final else judged
    )
    known = [at for scores in judged if (at := _not_above_chance(scores)) is not None]
    early = not late or not (
        final or has_learnt_a_while(summary)
    )  # a finished run will learn no more
    if early or not known or len(known) < len(judged):
        return None
    told = any(other.examine(summary, around) for other in (stuck_loss, collapsed))
    if told or not all(known):
        return None  # a model that learns nothing at all has findings of its own
    accuracies = numbers(batch_accuracy(event) for event in recent(summary.steps))
    trained = statistics.median(accuracies) if accuracies else 0.0
    learnt = trained > BY_HEART / max(1, summary.batch_size)
    evidence = "; ".join(_chance_text(scores) for scores in judged)
    batches = f"in training batches of {summary.batch_size} {trained:.1%}, chance {1 / max(1, summary.batch_size):.1%}"
    return Found(f"{evidence}; {batches}", "\n".join(_causes(summary, around, learnt=learnt)))


def _causes(summary: Summary, around: Surroundings, *, learnt: bool) -> list[str]:
    """Why a model may be at chance, the likeliest first, each with the command that tells. A model that has learnt its
    training pairs and nothing else has others than one that has learnt nothing."""
    per_epoch = number(summary.started.get("steps_per_epoch")) or summary.total_steps
    longer = around.train(f"train.epochs={math.ceil(4 * summary.total_steps / per_epoch)}")
    mismatch = f"the captions may belong to other images; to find out: {around.check_data()}"
    few = f"the pairs may be too few to train from scratch; pretrained towers need fewer: {around.train(recipe=HEADS)}"
    short = f"it may have seen too little yet: {longer}"
    rate = f"the learning rate may not suit the model: {around.train_gentler(summary)}"
    from_nothing = around.recipe in (DEFAULT_RECIPE, PHOTOS_RECIPE)
    if around.drawn:
        causes = [rate] if learnt else [short, rate]
    else:
        causes = [mismatch, *[few] * from_nothing] if learnt else [short, mismatch, rate]
    return [f"{at}. {cause}" for at, cause in enumerate(causes, 1)]


@check(
    "overfitting",
    "warning",
    "Held-out scores fall while the loss falls",
    f"the last {MIN_LATER_EVALUATIONS} evaluations all lost more than {LEAST_FALL:.0%} of the best score, or more than "
    f"{LEAST_RECALL_FALL:.0%} of its R@1 with {KNOWN_BY_HEART:.0%} of the training batches right, and the loss fell "
    "since; a note if the run ended early for it",
)
def overfitting(summary: Summary, around: Surroundings) -> Found | None:
    held_out = validation(summary)
    if held_out is None or held_out.trend is not Trend.FALLING:
        return None
    step = held_out.kept["step"]
    evidence = (
        f"text to image R@1 on held-out pairs fell from {percent(held_out.recalls[0])} at step {step:,} to "
        f"{percent(held_out.recalls[-1])} ({score_name(held_out.kept['evaluation'])} from {held_out.kept_score:.1%} to "
        f"{held_out.later_scores[-1]:.1%}), while the training loss fell from {held_out.loss_then:.3g} to "
        f"{held_out.loss_now:.3g}; {held_out.training_accuracy:.0%} of the pairs in training batches are matched right"
    )
    advice = (
        f"the model of step {step:,} is kept; more pairs, or more varied ones, make a better one"
    )
    if number(summary.setting("train", "patience")):
        return Found(evidence, advice, severity="note" if summary.ending.get("early") else "")
    return Found(evidence, f"{advice}; to stop in time: {around.train('train.patience=3')}")


@check(
    "collapsed",
    "alarm",
    "All similarities are alike: the embeddings have collapsed",
    f"held-out logits spread by less than {SAME:g}, after 30 steps and half of the warm-up",
)
def collapsed(summary: Summary, around: Surroundings) -> Found | None:
    latest = summary.evaluations[-1] if summary.evaluations else {}
    similar = mapping(mapping(latest.get("evaluation")).get("similarities"))
    scales = numbers(event.get("logit_scale") for event in recent(summary.steps))
    if not has_learnt_a_while(summary) or not scales:
        return None
    spread, mean = number(similar.get("spread")), number(similar.get("mean"))
    if spread is None or mean is None or spread * math.exp(scales[-1]) >= SAME:
        return None
    images, captions = (number(similar.get(side)) or 0.0 for side in ("pictures", "captions"))
    which = "images" if images > captions else "captions"
    return Found(
        f"similarity {mean:.3f} for any image and caption, give or take {spread:.1g}; any two images "
        f"{images:.3f}, any two captions {captions:.3f} (1 is the same)",
        f"see that the {which} differ from each other; then {around.train_gentler(summary)}",
    )


@check(
    "small-batch",
    "warning",
    "The batch is too small for the loss to mean much",
    f"fewer than {VERY_FEW_PAIRS} pairs; a note below {FEW_PAIRS}",
)
def small_batch(summary: Summary, around: Surroundings) -> Found | None:
    size = summary.batch_size
    if not 0 < size < FEW_PAIRS:
        return None
    images = number(mapping(summary.started.get("pairs")).get("train")) or 128
    larger = int(min(128, images))
    return Found(
        f"{size} pairs compare each image with {size - 1} wrong captions: a guess is right in {1 / size:.1%} of the "
        f"cases, and the loss can fall from {summary.chance_loss or 0.0:.2f} only",
        f"{around.train(f'train.batch_size={larger}')}; if memory is short, add --set train.micro_batch={size}",
        severity="" if size < VERY_FEW_PAIRS else "note",
    )


def _not_above_chance(scores: dict[str, Any]) -> bool | None:
    """Whether recall both ways may be that of guessing; None where there are too few candidates, or no intervals."""
    found = []
    for way in WAYS:
        match (
            mapping(scores.get("intervals")).get(f"{way}_{AT_CHANCE}"),
            number(scores.get("candidates")),
        ):
            case [low, _], candidates if (
                candidates and candidates >= ENOUGH_CANDIDATES and number(low) is not None
            ):
                found.append(low <= _chance(scores, way))
    return all(found) if len(found) == len(WAYS) else None


def _chance(scores: dict[str, Any], way: str) -> float:
    return (
        number(mapping(scores.get("chances")).get(f"{way}_{AT_CHANCE}"))
        or AT_CHANCE_RANK / scores["candidates"]
    )


def _chance_text(scores: dict[str, Any]) -> str:
    ways = [
        f"{name} {percent(scores.get(f'{way}_{AT_CHANCE}'))} ({interval(scores['intervals'][f'{way}_{AT_CHANCE}'])})"
        for way, name in WAYS.items()
    ]
    return f"{scores.get('split')} R@{AT_CHANCE_RANK}: {', '.join(ways)}, chance {_chance(scores, 't2i'):.1%}"


REPEATED = 0.1
"""Share of captions that another image has too. Below it the ceiling is hardly felt."""
MOST_HELD_OUT = 0.25
"""Share of the images in each of val and test that still leaves half for training."""
UNSURE = 0.1
"""Half the width of the 95 % interval of a recall of one half: beyond ten points two models are hard to tell apart."""


@check(
    "duplicate-captions",
    "warning",
    "Many images share a caption",
    f"more than {REPEATED:.0%} of the held-out captions are repeats; a note if only training captions are",
)
def duplicate_captions(summary: Summary, around: Surroundings) -> Found | None:
    counted = {
        split: mapping(counts) for split, counts in mapping(summary.started.get("captions")).items()
    }
    shares = {
        split: share
        for split, counts in counted.items()
        if (share := _distinct_share(counts)) is not None
    }
    repeated = {split: share for split, share in shares.items() if share < 1 - REPEATED}
    if not repeated:
        return None
    counts_text = [
        f"{split}: {counts['captions']:,} captions, {counts['distinct']:,} of them different"
        for split, counts in counted.items()
        if split in repeated
    ]
    held_out = next((split for split in ("val", "test") if split in repeated), None)
    if held_out is None:
        return Found(
            "; ".join(counts_text),
            "images that share a caption are never told apart in training; captions that say more would teach more",
            severity="note",
        )
    way_back = number(counted[held_out].get("told_apart"))
    ceiling = f"text-to-image R@1 can reach {repeated[held_out]:.1%} at most"
    other = f", image-to-text {way_back:.1%}" if way_back is not None else ""
    now = number(validated(summary).get("t2i_r1")) if held_out == "val" else None
    so_far = f" (now {now:.1%})" if now is not None else ""
    return Found(
        f"{'; '.join(counts_text)}; {ceiling}{so_far}{other}",
        "compare scores with that ceiling, not with 100 %; captions that say what is special of an image raise it",
    )


@check(
    "small-validation",
    "warning",
    "Too few held-out pairs to tell",
    f"the 95 % interval of a recall near one half is wider than {UNSURE:.0%} to either side",
)
def small_validation(summary: Summary, around: Surroundings) -> Found | None:
    count = number(mapping(summary.started.get("pairs")).get("val"))
    if not count:
        return None
    margin = 1.96 * math.sqrt(0.25 / count)
    if margin <= UNSURE:
        return None
    match mapping(validated(summary).get("intervals")).get("t2i_r1"):
        case [low, high] if number(low) is not None and number(high) is not None:
            recall = f"; 95 % interval of the best R@1 {low:.1%} to {high:.1%}"
        case _:
            recall = ""
    needed = math.ceil(0.25 * (1.96 / UNSURE) ** 2)
    total = sum(numbers(mapping(summary.started.get("pairs")).values()))
    share = (
        math.ceil(110 * needed / total) / 100 if total else 1.0
    )  # a tenth more: they are drawn by chance
    more = f"gather more images: {needed} held-out pairs would be enough, too many of these {total:,.0f}"
    if share <= MOST_HELD_OUT:
        more = f"hold out {needed} pairs or more, unless the data names its splits: "
        more += around.train(f"data.held_out={share:g}")
    return Found(
        f"with {count:,.0f} held-out pairs a recall near 50 % is only known to within {margin:.0%}{recall}",
        f"trust no difference between two runs below {2 * margin:.0%}; {more}",
    )


def _distinct_share(counts: dict[str, Any]) -> float | None:
    captions, distinct = number(counts.get("captions")), number(counts.get("distinct"))
    return distinct / captions if captions and distinct is not None else None


CHECKS = (
    stuck_loss,
    at_chance,
    overfitting,
    collapsed,
    small_batch,
    duplicate_captions,
    small_validation,
)
