"""`lapclip eval --before`: what changed since another model, and the best model between both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lapclip.commands.evaluation_data import (
    ALL,
    ChosenData,
    EvaluationRequest,
    choose_data,
    choose_templates,
    count_trained_on,
    open_data,
)
from lapclip.data.pixels import View
from lapclip.data.sources import absolute, find_source
from lapclip.embedder import Encoder, load, load_torch
from lapclip.errors import ConfigError, DataError, RunError
from lapclip.evaluation.blend import SHARES, Blend
from lapclip.evaluation.mean_score import MeanScore
from lapclip.progress import DataProgress, Progress
from lapclip.training.checkpoint import save_model
from lapclip.which_model import WhichModel, which_model


@dataclass(frozen=True)
class Change:
    """Scores of a data set with the model before, the model after, and the blend of both."""

    data: str
    split: str
    images: int
    trained_on: int | None
    """Number of these images that the model learned from. None if that is not known."""
    measure: str
    chance: float
    before: float
    after: float
    change_interval: list[float]
    """95 % interval of the change."""
    blended: float | None = None

    def to_text(self) -> str:
        """Return the change as one sentence."""
        name = Path(absolute(self.data)).name
        points = 100 * (self.after - self.before)
        low, high = self.change_interval
        verb = "rose" if points > 0 else "fell"
        if low <= 0 <= high:
            verb += " (which may be noise)"
        text = (
            f"On {name}, {self.measure} {verb} from {self.before:.1%} to {self.after:.1%} "
            f"({points:+.1f} points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f})."
        )
        if self.trained_on:
            text += f" The model learned from {self.trained_on:,} of these {self.images:,} images."
        return text


@dataclass(frozen=True)
class BlendChoice:
    """The best model between two."""

    share: float
    """Share of the way from the model before (0) to the model after (1)."""
    folder: str
    validation: list[tuple[float, float]]
    """Each share with its score on the val split."""


@dataclass(frozen=True)
class Comparison:
    """What changed since another model."""

    model: str
    recalls: dict[str, float]
    """Recalls of the model before, as "t2i_r1". Empty for classes."""
    changes: list[Change]
    """The evaluated data first, then the check data."""
    blend: BlendChoice | None

    def to_text(self) -> str:
        """Return a paragraph about the changes and the blend."""
        sentences = [f"Since {self.model}:"]
        sentences += [change.to_text() for change in self.changes]
        if self.blend:
            scores = []
            for change in self.changes:
                scores.append(f"{change.blended:.1%} on {Path(absolute(change.data)).name}")
            sentences.append(
                f"The best blend on val is {self.blend.share:.0%} of the way from before to after: "
                f"{', '.join(scores)}. It is in {self.blend.folder}."
            )
            if self.changes[0].split in ("val", ALL):
                sentences.append("The first score is too good: the same pairs chose the blend.")
        return " ".join(sentences)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"summary": self.to_text()}


@dataclass(frozen=True)
class PreparedComparison:
    """Both models and all data of a comparison, opened and checked before anything is scored."""

    model: WhichModel
    which_before: WhichModel
    before: Encoder
    sets: Sequence[ChosenData]
    """The evaluated data first, then the check data."""
    blend: Blend | None
    validation: ChosenData | None
    """Pairs that choose the blend. None without a blend."""

    def run(
        self, embedder: Encoder, after: MeanScore, progress: Progress | None = None
    ) -> Comparison:
        """Score the model before on all data, and `embedder`, the model after, on the check data.

        `after` is the score of the model after on the evaluated data.
        """
        afters = [after]
        for check in self.sets[1:]:
            afters.append(check.mean_score(embedder, progress))
        befores = [each.mean_score(self.before, progress) for each in self.sets]
        changes = []
        for each, old, new in zip(self.sets, befores, afters, strict=True):
            changes.append(
                Change(
                    data=each.config.source,
                    split=each.opened.split,
                    images=len(each.opened.pairs),
                    trained_on=count_trained_on(self.model, each.opened),
                    measure=new.measure,
                    chance=new.chance,
                    before=old.value,
                    after=new.value,
                    change_interval=new.change_interval(old),
                )
            )
        choice = None
        if self.blend is not None and self.validation is not None:
            choice = self.save_best_blend(self.blend, self.validation, progress)
            for index, each in enumerate(self.sets):
                blended = each.mean_score(self.blend.embedder, progress).value
                changes[index] = replace(changes[index], blended=blended)
        return Comparison(str(self.which_before.path), befores[0].recalls, changes, choice)

    def save_best_blend(
        self, blend: Blend, validation: ChosenData, progress: Progress | None
    ) -> BlendChoice:
        """Save the blend with the best score on the val split."""
        assert self.model.run is not None
        scores = []
        for share in SHARES:
            blend.mix(share)
            scores.append((share, validation.mean_score(blend.embedder, progress).value))
        best, _ = max(scores, key=lambda entry: entry[1])
        blend.mix(best)
        save_model(blend.embedder, self.model.run.blended)
        return BlendChoice(best, str(self.model.run.blended), scores)


def find_before(request: EvaluationRequest, model: WhichModel) -> WhichModel | None:
    """Return the model to compare with, if there is one. Refuse options that need another one."""
    if request.before is None:
        if request.check or request.blend:
            flag = "--blend" if request.blend else "--check"
            raise ConfigError(f"{flag} needs a model to compare with.", hint="--before MODEL")
        return None
    if request.blend:
        if model.run is None:
            raise RunError(f"{model.path} is not a run.", hint="--blend needs a run to write to")
        model.run.check_links()
    return which_model(request.before)


def prepare_comparison(
    request: EvaluationRequest,
    model: WhichModel,
    which_before: WhichModel,
    data: ChosenData,
    data_progress: DataProgress | None,
) -> PreparedComparison:
    """Open the model before and the check data. For a blend, open the val split, too."""
    blend = None
    validation = None
    if not request.blend:
        before = load(which_before.path, request.device)
    else:
        before = load_torch(which_before.path, request.device)
        blend = Blend(before, load_torch(model.path, request.device))
        try:
            validation = data.with_split("val", data_progress)
        except DataError as error:
            hint = "leave out --blend, which needs val"
            raise DataError(error.message, hint=hint) from None
    checks = [open_check(model, source, data.view, data_progress) for source in request.check]
    return PreparedComparison(model, which_before, before, [data, *checks], blend, validation)


def open_check(
    model: WhichModel, source: str, view: View, progress: DataProgress | None
) -> ChosenData:
    """Open data that the model should still know: its own test or val split, or all of it."""
    config, is_own = choose_data(model, EvaluationRequest(data=source))
    if is_own:
        raise DataError(f"{source} is what the run learned from.", hint="--check OTHER")
    if find_source(config.source).is_drawn:
        config = replace(config, train_pairs=2, min_pairs=2)  # only the test split is needed
    opened = open_data(config, view, None, None, progress)
    templates = choose_templates(config, own=False)
    return ChosenData(config, view, templates, opened, None, None)
