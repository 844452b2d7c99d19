"""`lapclip machine`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from lapclip.cli.output import Common, emit, typed
from lapclip.text import counted, gigabytes

MARKS = {
    True: "[green]ok[/green]     ",
    False: "[yellow]warning[/yellow]",
    None: "[dim]unknown[/dim]",
}


def machine(*, common: Common | None = None) -> int:
    """Show what this computer has, and whether it is ready to train.

    The first time with a new torch or system, an accelerator is also checked for a few seconds: whether it computes
    what the CPU computes.

    For example:

    - `lapclip machine`
    - `lapclip machine --json`
    """
    from lapclip.machine.overview import overview

    with Console(stderr=True).status("examining the machine") as status:
        found = overview(status.update)
    lines = [f"  {name:<14}{escape(text)}" for name, text in rows(found)]
    listed = [
        f"  {MARKS[check['ok']]}  {check['name']:<16}{escape(check['text'])}"
        for check in found["checks"]
    ]
    head = f"[bold]{escape(found['chip'])}[/bold]"
    emit(
        found,
        [head, *lines, "", "[bold]checks[/bold]", *listed, "", f"Next: {typed('train')}"],
        common,
    )
    return 0


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Every fact, as a name and a text."""
    listed = [
        ("cores", _cores(found)),
        (
            "memory",
            f"{gigabytes(found['memory_bytes'])}, {gigabytes(found['memory_free_bytes'])} free",
        ),
        ("swap", _swap(found)),
        ("disk", f"{gigabytes(found['disk_free_bytes'])} free here"),
        ("power", _power(found)),
        ("heat", f"{_number(found['celsius'], 'C')}, clock {_number(found['megahertz'], 'MHz')}"),
        ("energy", _energy(found)),
        ("system", f"{found['system']} on {found['architecture']}, Python {found['python']}"),
        ("torch", _torch(found["torch"])),
    ]
    listed += [("accelerator", _accelerator(each)) for each in found["accelerators"]] or [
        ("accelerator", "none found")
    ]
    return listed


def _cores(found: dict[str, Any]) -> str:
    physical = "unknown" if found["physical_cores"] is None else found["physical_cores"]
    text = f"{physical}, {counted(found['cores'], 'thread')}"
    if found["usable_cores"] != found["cores"]:
        text += f", {found['usable_cores']} usable here"
    return text


def _swap(found: dict[str, Any]) -> str:
    if found["swap_bytes"] == 0:
        return "none"
    return f"{gigabytes(found['swap_bytes'])}, {gigabytes(found['swap_used_bytes'])} in use"


def _power(found: dict[str, Any]) -> str:
    percent = found["battery_percent"]
    battery = "no battery seen" if percent is None else f"battery at {percent:.0f} %"
    low = {None: "unknown", True: "on", False: "off"}[found["low_power_mode"]]
    return f"source {found['power_source'] or 'unknown'}, {battery}, low-power mode {low}"


def _energy(found: dict[str, Any]) -> str:
    watts = ", ".join(f"{name} {value:g} W" for name, value in (found["watts"] or {}).items())
    return "; ".join(part for part in (watts, found["energy_reason"]) if part) or "unknown"


def _torch(build: dict[str, Any] | None) -> str:
    if build is None:
        return "not installed"
    backend = (
        f"CUDA {build['cuda']}"
        if build["cuda"]
        else f"ROCm {build['hip']}"
        if build["hip"]
        else None
    )
    parts = [
        build["version"],
        backend,
        counted(build["threads"], "thread"),
        f"vectors {build['vectors']}",
    ]
    return ", ".join(part for part in parts if part)


def _accelerator(each: dict[str, Any]) -> str:
    memory = (
        "shares the machine's memory"
        if each["shares_memory"]
        else f"memory {gigabytes(each['memory_bytes'])}"
    )
    free = f", {gigabytes(each['free_bytes'])} free" if each["free_bytes"] is not None else ""
    return f"{each['name']} ({each['kind']}), {memory}{free}, driver {each['driver'] or 'unknown'}"


def _number(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.0f} {unit}"
