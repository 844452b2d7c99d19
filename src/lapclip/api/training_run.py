"""A run that was trained, as Python code looks at it: what it learnt, how it went, and its model."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip.config import SECTIONS
from lapclip.report import write_report
from lapclip.report.document import (
    Plot,
    table_html,
)
from lapclip.report.plots import plotly_figure
from lapclip.report.run_plots import learning_sections
from lapclip.runs.events import mapping, read_events
from lapclip.runs.folder import Run
from lapclip.runs.summary import Summary, summarise
from lapclip.runs.view import RunView, view_of
from lapclip.text import count, path_from_here, percent

if TYPE_CHECKING:
    from lapclip.embedder import Encoder

PLOTS = {"loss": "Loss", "recall": "Accuracy and recall", "temperature": "Temperature"}
"""What `TrainingRun.plot` draws, and the title that reports give it."""
NO_STEP = "There is nothing to draw before the first step."


class TrainingRun:
    """A run's folder, seen from Python: given by `lapclip.train`, `lapclip.resume` and `lapclip.open_run`.

    Everything is read from the folder when it is asked for, so a run that is still being trained shows how far it is.
    Wherever lapclip takes a model by its path, it takes such a run as well.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        """The run's folder."""
        self.name = self.path.name

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def state(self) -> str:
        """running, finished, stopped, failed, or died: ended without a word."""
        return Run(self.path).state

    @property
    def metrics(self) -> dict[str, Any]:
        """Recall on held-out pairs, with intervals and chance: of the finished model on the split that chose nothing,
        before that of the latest evaluation. Empty before the first."""
        summary = self._summary()
        if found := mapping(summary.ending.get("evaluation")):
            return found
        last = summary.evaluations[-1] if summary.evaluations else {}
        return {"split": last.get("split"), **last["evaluation"]} if last else {}

    @property
    def history(self) -> list[dict[str, Any]]:
        """A dictionary for each step with `step`, `epoch`, `loss`, `t2i_accuracy`, `i2t_accuracy`, `temperature`, `lr`,
        `grad_norm` and more (docs/events.md). `pandas.DataFrame(run.history)` makes a table of it."""
        return [_plain(event) for event in self._summary().steps]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """A dictionary for each evaluation while it was trained: `step`, `epoch`, `best` and the metrics."""
        return [{**_plain(event), **event["evaluation"]} for event in self._summary().evaluations]

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events so far, as events.jsonl has them (docs/events.md)."""
        return list(read_events(Run(self.path).events))

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Every setting that the run has, by section; `settings["reasons"]` says why each automatic choice was made."""
        saved = Run(self.path).read_settings()
        return {section: saved.get(section, {}) for section in (*SECTIONS, "reasons")}

    @cached_property
    def model(self) -> Encoder:
        """The best model so far, on the CPU, as `lapclip.load(run)` gives it. Loaded once: `lapclip.load` again takes
        another device, or what a run that goes on has learnt since."""
        from lapclip.embedder import load  # here: nothing else needs torch

        return load(self.path)

    def plot(self, name: str = "recall") -> RunPlot:
        """Return a chart of the run, which a notebook shows: `loss`, `recall` or `temperature`.

        `run.report()` writes a page with this and more.
        """
        if name not in PLOTS:
            raise ValueError(f"There is no plot {name!r}. Known: {', '.join(PLOTS)}.")
        for section in learning_sections(self._view()):
            for block in section.blocks:
                if isinstance(block, Plot) and block.title == PLOTS[name]:
                    return RunPlot(self.name, block)
        return RunPlot(self.name, None)

    def report(self, out: str | os.PathLike[str] | None = None) -> list[Path]:
        """Write the whole report, as `lapclip report` does: a page and Markdown, into the run's folder or another."""
        return write_report(str(self.path), Path(out) if out is not None else None)[0]

    def __repr__(self) -> str:
        return f"<TrainingRun {path_from_here(self.path)}: {', '.join(self._facts().values())}>"

    def _facts(self) -> dict[str, str]:
        view = self._view()
        steps = f"{count(view.summary.step)} of {count(view.summary.total_steps)} steps"
        facts = {"state": view.status, "progress": steps}
        metrics = self.metrics
        if (found := metrics.get("t2i_r1")) is not None:
            among = f"among {count(metrics.get('candidates'))} of {metrics.get('split')}"
            facts["recall"] = (
                f"text to image R@1 {percent(found)} {among} (chance {percent(metrics.get('chance'))})"
            )
        return facts

    def _view(self) -> RunView:
        return view_of(Run(self.path))

    def _summary(self) -> Summary:
        return summarise(read_events(Run(self.path).events))


class RunPlot:
    """A chart that a notebook draws below its cell, without a network. Without plotly it shows a table."""

    def __init__(self, name: str, plot: Plot | None) -> None:
        self.name, self._plot = name, plot

    def __repr__(self) -> str:
        title = self._plot.title.lower() if self._plot else "nothing yet"
        return f"<RunPlot of {self.name}: {title}; a notebook shows it>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        if self._plot is None:
            return {"text/plain": repr(self), "text/html": f"<p>{NO_STEP}</p>"}
        return {
            "text/plain": repr(self),
            "text/html": table_html(self._plot.table),
            "application/vnd.plotly.v1+json": plotly_figure(self._plot),
        }


def _plain(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what only its file needs."""
    return {
        name: value
        for name, value in event.items()
        if name not in ("v", "type", "evaluation", "process")
    }
