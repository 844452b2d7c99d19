"""Shared results of many machines as one report: how soon runs reach a recall, training steps beside another
trainer's, and comparisons of devices. The files have passed `lapclip.results.read_result`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lapclip.config import DEFAULT_RECIPE
from lapclip.report.comparison_report import fastest, timed_cells
from lapclip.report.document import Block, Plot, Report, Section, Sentences, Table
from lapclip.report.plots import COLOURS, DASHES, axes, level, line, plain
from lapclip.results import COMPARISON, FLICKR8K, RUN, SCENES, STEPS, kind_of
from lapclip.runs.curves import Curve
from lapclip.runs.view import RunView
from lapclip.text import UNKNOWN, count, counted, duration, milliseconds, parameters, percent, significant, size

SAME_RESULT = frozenset(
    f"train.{name}"
    for name in (
        "seed", "device", "image_device", "text_device", "dtype", "image_attention", "text_attention", "linear",
        "compile", "threads", "loader_threads", "micro_batch", "recompute", "evaluate_every_epochs",
        "checkpoint_every_seconds", "checkpoint_every_epochs",
    )
)  # fmt: skip
"""Settings that leave what is learnt alone, but for chance: a run may have changed them and still be compared."""
NOT_REACHED = "not reached"
MOST_LINES = len(COLOURS) * len(DASHES)
"""Curves of a plot that can be told apart."""


@dataclass(frozen=True)
class Goal:
    """A recall on the validation pairs whose time is compared."""

    data: str
    title: str
    metric: str
    metric_name: str
    recall: float
    about: str
    comparable: Callable[[dict[str, Any]], bool] = lambda run: True

    def fits(self, run: dict[str, Any]) -> bool:
        """Whether a run may be compared by it."""
        return run["data"] == self.data and self.comparable(run)


_GOALS = (
    Goal(
        SCENES,
        "Time to 60 % on drawn scenes",
        "t2i_r1",
        "text-to-image R@1",
        0.6,
        "lapclip train, with no data and no settings: 5,000 drawn scenes, and how long it takes until 60 % of the "
        "captions find their own scene first among those held out.",
        lambda run: run["recipe"] == DEFAULT_RECIPE and set(run["changed"]) <= SAME_RESULT,
    ),
    Goal(
        FLICKR8K,
        "Time to a recall on Flickr8k",
        "t2i_r10",
        "text-to-image R@10",
        0.25,
        "Runs on Flickr8k's own splits, and how long it takes until a quarter of the 5,000 captions find their photo "
        "among the first ten of 1,000. Which recipe a run has, and whether its towers were pretrained, matters more "
        "than the machine.",
    ),
)
GOALS = {goal.data: goal for goal in _GOALS}
ONE_EVALUATION = (
    "Time counts from the first step and includes evaluations; it is that of the first evaluation with the recall. "
    "Set-up, which is drawing or packing images and timing settings, comes before it."
)


def results_report(results: Sequence[dict[str, Any]]) -> Report:
    """All results on one page."""
    runs, steps, comparisons = (
        [result for result in results if kind_of(result) == kind] for kind in (RUN, STEPS, COMPARISON)
    )
    sections, rest = [], runs
    for goal in GOALS.values():
        sections += _goal_section(goal, [run for run in rest if goal.fits(run)])
        rest = [run for run in rest if not goal.fits(run)]
    sections += [*_other_runs(rest), *_steps_section(steps), *_comparison_section(comparisons), *_machines(results)]
    machines = {machine_name(result) for result in results}
    return Report("Results of many machines", f"{counted(len(results), 'file')}, {counted(len(machines), 'machine')}",
                  [], sections)  # fmt: skip


def result_tables(results: Sequence[dict[str, Any]]) -> list[tuple[str, Table]]:
    """The tables of the page with their titles, without those that are folded."""
    sections = results_report(results).sections
    return [(s.title, block) for s in sections for block in s.blocks if isinstance(block, Table) and not block.folded]


def machine_name(result: dict[str, Any]) -> str:
    """A machine as people call it: its accelerator, if the result is of one, and its processor with its cores."""
    chip, cores = result["machine"]["chip"], counted(result["machine"]["cores"], "core")
    accelerators = [label for label in result["devices"].values() if label != chip]  # a Mac's GPU bears the chip's name
    return ", ".join(dict.fromkeys([*accelerators, chip, cores]))


def seconds_to(goal: Goal, run: dict[str, Any]) -> float | None:
    """Seconds of training until the recall; None where it never had it."""
    return min((e["seconds"] for e in run["evaluations"] if e[goal.metric] >= goal.recall), default=None)


def _how(run: dict[str, Any]) -> str:
    """On which device, in which precision."""
    ranks = f", {run['ranks']} ranks" if run["ranks"] > 1 else ""
    return f"{RunView.devices_text(run['towers'])} {run['choices'].get('dtype', '')}{ranks}"


def _goal_section(goal: Goal, runs: list[dict[str, Any]]) -> list[Section]:
    """The runs that can be compared by a goal, the fastest first."""
    if not runs:
        return []
    reached = {id(run): seconds_to(goal, run) for run in runs}
    never = float("inf")
    runs = sorted(runs, key=lambda run: (never if reached[id(run)] is None else reached[id(run)], machine_name(run)))
    rows: list[list[Any]] = []
    for run in runs:
        seconds = reached[id(run)]
        rows.append(
            [
                machine_name(run),
                _how(run),
                *([_recipe(run), run["start"]] if goal.metric == "t2i_r10" else []),
                NOT_REACHED if seconds is None else duration(seconds),
                duration(run["set_up_seconds"]),
                duration(run["training_seconds"]),
                f"{percent(run['evaluation'][goal.metric])} ({run['evaluation']['split']})",
                count(run["pairs_per_second"]),
                size(run["peak_memory_bytes"]),
            ]
        )
    kinds = ["recipe", "start"] if goal.metric == "t2i_r10" else []
    to = f"time to {percent(goal.recall, 0)}"
    columns = [
        "machine",
        "device",
        *kinds,
        to,
        "set-up",
        "whole training",
        f"{goal.metric_name.split()[-1]} at the end",
        "pairs/s",
    ]
    blocks: list[Block] = [Sentences([goal.about]), Table([*columns, "peak memory"], rows)]
    return [Section(goal.title, [*blocks, Sentences([ONE_EVALUATION]), *_recall_plot(goal, runs)])]


def _recall_plot(goal: Goal, runs: list[dict[str, Any]]) -> list[Block]:
    """Recall over time, a line for each run."""
    shown = [run for run in runs if any(e["seconds"] > 0 for e in run["evaluations"])][:MOST_LINES]
    if not shown:
        return []
    traces, rows = [], []
    for at, run in enumerate(shown):
        points = [(e["seconds"], e[goal.metric]) for e in run["evaluations"] if e["seconds"] > 0]
        curve = Curve([x for x, _ in points], [y for _, y in points])
        colour = COLOURS[at % len(COLOURS)]
        name = f"{machine_name(run)}, {_how(run)}"
        style = {"color": colour, "width": 2, "dash": DASHES[at // len(COLOURS)]}
        traces.append(line(name, curve, colour, share=True, mode="lines+markers", line=style))
        rows += [[name, duration(x), percent(y)] for x, y in points]
    every = [x for trace in traces for x in trace["x"]]
    traces.append(level(f"{percent(goal.recall, 0)}", [min(every), max(every)], goal.recall))
    return [
        Plot(
            f"{goal.metric_name} over time",
            traces,
            axes("seconds of training", goal.metric_name, share=True, x_log=True),
            "Best so far on the validation pairs. Seconds grow by powers of ten: the same shape further left is a "
            "faster machine.",
            Table(["", "after", goal.metric_name], rows),
            height=380,
        )
    ]


def _recipe(run: dict[str, Any]) -> str:
    changes = [f"{name}={value}" for name, value in run["changed"].items() if name not in SAME_RESULT]
    return ", ".join([run["recipe"], *changes])


def _other_runs(runs: list[dict[str, Any]]) -> list[Section]:
    """Runs on data of one's own, or with settings of one's own: each stands for itself."""
    rows: list[list[Any]] = [
        [
            machine_name(run),
            _how(run),
            f"{run['model']}, {parameters(run['parameters'])}",
            f"{run['data']}, {count(run['pairs'].get('train'))}",
            duration(run["training_seconds"]),
            f"{percent(run['evaluation']['t2i_r1'])} of {count(run['evaluation']['candidates'])}",
            count(run["pairs_per_second"]),
            size(run["peak_memory_bytes"]),
            _recipe(run),
        ]
        for run in sorted(runs, key=machine_name)
    ]
    columns = ["machine", "device", "model", "images", "training", "R@1", "pairs/s", "peak memory", "recipe, changes"]
    about = Sentences(["Other data or other settings, so these rows are not to be compared with each other."])
    return [Section("Other runs", [about, Table(columns, rows)])] if rows else []


def _steps_section(results: list[dict[str, Any]]) -> list[Section]:
    """Whole training steps beside another trainer's."""
    found = [(machine_name(result), result, row) for result in results for row in result["rows"]]
    found.sort(key=lambda one: (one[0], one[2]["model"], one[2]["dtype"], one[2]["batch"]))
    if not found:
        return []
    rows: list[list[Any]] = [
        [
            name,
            row["device"],
            row["model"],
            row["dtype"],
            count(row["batch"]),
            f"{row['peer_ms'] / row['ours_ms']:.2f}x",
            milliseconds(row["ours_ms"]),
            f"{milliseconds(row['peer_ms'])} ({row['peer_settings']})",
            result["peer"],
        ]
        for name, result, row in found
    ]
    columns = ["machine", "device", "model", "precision", "batch", "ratio", "lapclip", "the other", "the other trainer"]
    about = "The same model, weights, batch and precision in turns, in one process; above 1x lapclip is faster."
    blocks: list[Block] = [Sentences([about]), Table(columns, rows)]
    shown = found[:MOST_LINES]
    labels = [f"{row['model']}, {row['dtype']}, batch {row['batch']}" for _, _, row in shown]
    traces = []
    for at, machine in enumerate(dict.fromkeys(name for name, _, _ in shown)):
        own = [(label, row) for label, (name, _, row) in zip(labels, shown, strict=True) if name == machine]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(machine),
                "y": [plain(label) for label, _ in own],
                "x": [row["peer_ms"] / row["ours_ms"] for _, row in own],
                "marker": {"color": COLOURS[at % len(COLOURS)]},
                "hovertemplate": f"{plain(machine)}, %{{y}}: %{{x:.2f}}x<extra></extra>",
            }
        )
    layout = axes("times as fast as the other trainer", "")
    layout["yaxis"] |= {"autorange": "reversed", "type": "category", "automargin": True}
    layout["shapes"] = [
        {
            "type": "line",
            "x0": 1,
            "x1": 1,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": "--muted", "dash": "dash"},
        }
    ]
    plot = Plot(
        "How many times as fast",
        traces,
        layout,
        "The dashed line is a tie.",
        Table(
            ["", "", "ratio"],
            [[name, label, row[5]] for (name, _, _), label, row in zip(shown, labels, rows, strict=False)],
        ),
        height=140 + 34 * len(shown),
    )
    return [Section("Training steps beside another trainer's", [*blocks, plot])]


def _comparison_section(results: list[dict[str, Any]]) -> list[Section]:
    """The fastest step of each machine at each size, and what is fastest there."""
    if not results:
        return []
    results = sorted(results, key=machine_name)
    bests = [fastest(timed_cells(result)) for result in results]
    names = [machine_name(result) for result in results]
    cells = sorted({cell for best in bests for cell in best})
    verdicts: list[list[Any]] = [
        [name, result["torch"], result["crossover"]["text"]] for name, result in zip(names, results, strict=True)
    ]
    rows: list[list[Any]] = [
        [parameters(cell[0]), count(cell[1]), *(milliseconds(best.get(cell)) for best in bests)] for cell in cells
    ]
    blocks: list[Block] = [Table(["machine", "torch", "what is fastest there"], verdicts)]
    blocks += _step_plot(names, bests)
    blocks.append(Table(["model", "batch", *names], rows, folded="The fastest step of each machine"))
    return [Section("Devices compared", blocks)]


def _step_plot(names: list[str], bests: list[dict[tuple[float, float], float]]) -> list[Block]:
    """The fastest step over the model's size, at the batch that most machines have most sizes of."""
    batches = [batch for best in bests for _, batch in best]
    if not batches:
        return []
    batch = statistics.mode(sorted(batches))
    traces, rows = [], []
    for at, (name, best) in enumerate(zip(names[:MOST_LINES], bests, strict=False)):
        points = sorted((model, ms) for (model, of), ms in best.items() if of == batch)
        colour = COLOURS[at % len(COLOURS)]
        style = {"color": colour, "width": 2, "dash": DASHES[at // len(COLOURS)]}
        curve = Curve([x for x, _ in points], [y for _, y in points])
        traces.append(line(name, curve, colour, unit=" ms", mode="lines+markers", line=style))
        rows += [[name, parameters(x), significant(y)] for x, y in points]
    return [
        Plot(
            f"The fastest training step at batch {count(batch)}",
            traces,
            axes("parameters", "ms a step", x_log=True, y_log=True),
            "The fastest device and precision of each machine. Lower is faster; both axes grow by powers of ten.",
            Table(["", "parameters", "ms a step"], rows),
            height=380,
        )
    ]


def _machines(results: Sequence[dict[str, Any]]) -> list[Section]:
    """Every file's machine and releases."""
    kinds = {RUN: "a run", STEPS: "training steps", COMPARISON: "a comparison"}
    rows: list[list[Any]] = []
    for result in sorted(results, key=machine_name):
        machine, releases = result["machine"], f"lapclip {result['lapclip']}, torch {result['torch']}"
        system = f"{machine['system']}, {machine['architecture']}, Python {machine['python']}"
        commit = result.get("commit") or UNKNOWN
        what = kinds[kind_of(result)]
        rows.append([machine_name(result), what, size(machine["memory_bytes"]), system, releases, commit])
    columns = ["machine", "file", "memory", "system", "releases", "commit"]
    return [Section("Machines and releases", [Table(columns, rows, folded="Of each file")])] if rows else []
