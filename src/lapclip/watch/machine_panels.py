"""What the machine does: the panels of a step and of the machine."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from lapclip.text import number, one_line, significant, size
from lapclip.watch import sparklines as sparks
from lapclip.watch.canvas import SHORT_LABEL, Paper, fitting, rows_of, section
from lapclip.watch.run_view import Look

PHASE_COLOURS = {
    "load": "red",
    "preprocess": "yellow",
    "transfer": "magenta",
    "forward": "blue",
    "backward": "cyan",
    "optimizer": "green",
}
OTHER_COLOURS = ("bright_blue", "bright_magenta", "bright_yellow", "bright_green")
NOTABLE = 0.005
"""Of a step's time, below which a phase is not shown."""


def step_phases(look: Look, paper: Paper) -> RenderableType | None:
    """Where the time of a step goes, as one bar."""
    phases = look.summary.phases()
    total = sum(phases.values())
    phases = {name: seconds for name, seconds in phases.items() if seconds > NOTABLE * total}
    if not total:
        return None
    colours = {name: PHASE_COLOURS.get(name, OTHER_COLOURS[at % 4]) for at, name in enumerate(phases)}
    drawn, legend = Text(no_wrap=True), [Text()]
    for (name, seconds), count in zip(phases.items(), sparks.split(list(phases.values()), paper.inside), strict=True):
        # Without colours the first letter of its name tells a phase.
        solid = paper.colour and not paper.plain
        mark = "█" if solid else one_line(name)[:1].upper()
        drawn.append(mark * count, style=colours[name])
        entry = Text.assemble(("■" if solid else mark, colours[name]), f" {one_line(name)} {seconds / total:.0%}")
        if legend[-1] and len(legend[-1]) + 2 + len(entry) > paper.inside:
            legend.append(Text())
        legend[-1].append_text(Text("  " if legend[-1] else "") + entry)
    milliseconds = f"{significant(total * 1000)} ms" if total < 1 else f"{significant(total)} s"
    return section(f"A step: {milliseconds}", Group(drawn, *legend), paper)


def machine(look: Look, paper: Paper) -> RenderableType | None:
    """Memory, cores, energy and heat."""
    rows, room = rows_of(SHORT_LABEL), paper.inside - SHORT_LABEL
    process, peak, whole = look.memory
    if peak is not None:
        now = f"{size(process)} now, " if process is not None and look.working else ""
        of = f" of {size(whole)}" if whole else ""
        rows.add_row("memory", Text(fitting(room, f"{now}{size(peak)} peak", of)))
    if look.core_use:
        rows.add_row("cores", _cores(look.core_use, room, paper))
    if look.sensors:
        rows.add_row("energy", _energy(look, room))
        celsius, megahertz = number(look.sensors.get("celsius")), number(look.sensors.get("megahertz"))
        degrees = "C" if paper.plain else "°C"
        heat = [f"{celsius:.0f} {degrees}" if celsius is not None else "", f"{megahertz:,.0f} MHz" if megahertz else ""]
        if look.sensors.get("throttled") is True:
            rows.add_row("heat", Text(", ".join([*filter(None, heat), "slowed down by heat"]), style="bold red"))
        elif any(heat):
            rows.add_row("heat", Text(", ".join(filter(None, heat))))
        if swap := number(look.sensors.get("swap_bytes")):
            rows.add_row("swap", Text(f"{size(swap)} in use"))
    return section("Machine", rows, paper) if rows.row_count else None


def _cores(use: list[float], room: int, paper: Paper) -> Text:
    """A small bar each, and how busy they are."""
    text = Text(overflow="fold")
    for each in use:
        colour = "green" if each > 0.5 else "yellow" if each > 0.1 else "dim"
        text.append(sparks.level(each, paper.plain) + (" " if len(use) <= 8 else ""), style=colour)
    mean = f"{'' if len(use) <= 8 else ' '}{sum(use) / len(use):.0%}"
    return text.append(fitting(room - len(text) % room, mean, " in use"))


def _energy(look: Look, room: int) -> Text:
    reason = one_line(look.sensors.get("reason") or "").removeprefix("not measurable here: ")
    if look.joules is None:
        return Text(f"not measurable here: {reason or 'no reason was recorded'}", style="dim")
    watts = f", {significant(look.watts)} W" if look.watts is not None and look.working else ""
    hours = f", {significant(look.joules / 3600)} Wh" if look.joules > 360 else ""
    return Text(fitting(room, f"{significant(look.joules)} J{watts}", hours))
