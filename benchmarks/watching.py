"""What watching costs: time to an image, memory, a run of a million events, and the processor while a run goes on.

    .venv/bin/python benchmarks/watching.py RUN

RUN is any run of this folder; its steps are repeated up to a million in a folder of their own. Takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import filelock
import psutil

from lapclip.runs.folder import find_run

PORT = 8792
SECONDS = 30.0
"""How long the watchers are watched."""
MILLION = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    run = find_run(parser.parse_args().run)
    lines = run.events.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        settings = run.settings.read_bytes()
        write(here / "runs" / "short", settings, lines)
        write(here / "runs" / "long", settings, many(lines))
        for name in ("short", "long"):
            seconds, memory = once(here, name)
            size = (here / "runs" / name / "events.jsonl").stat().st_size
            print(
                f"watch --once, {size / 1e6:,.0f} MB of events: {seconds:.2f} s, {memory / 1e6:.0f} MB resident"
            )
        share, memory = page(here, lines)
        print(
            f"watch --web, a run with 20 steps a second in one tab: {share:.2%} of a core, {memory / 1e6:.0f} MB"
        )


def write(folder: Path, settings: bytes, lines) -> None:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_bytes(settings)
    with open(folder / "events.jsonl", "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def many(lines: list[str]):
    """The run's first line, its steps again and again, and an evaluation a thousand steps."""
    yield lines[0]
    steps = [json.loads(line) for line in lines if '"type":"step"' in line]
    evaluations = [json.loads(line) for line in lines if '"type":"evaluation"' in line]
    began = steps[0]["time"]
    for number in range(1, MILLION + 1):
        time_ = began + 0.01 * number
        step = steps[number % len(steps)] | {
            "step": number,
            "time": time_,
            "epoch": number // 1000 + 1,
        }
        yield json.dumps(step, separators=(",", ":"))
        if number % 1000 == 0 and evaluations:
            yield json.dumps(
                evaluations[-1] | {"step": number, "time": time_}, separators=(",", ":")
            )


def once(here: Path, name: str) -> tuple[float, int]:
    """Seconds from the start of the command to its end, and the most memory seen."""
    began = time.perf_counter()
    process = psutil.Popen(
        [sys.executable, "-m", "lapclip", "watch", name, "--once"],
        cwd=here,
        stdout=subprocess.DEVNULL,
    )
    memory = 0
    while process.poll() is None:
        with suppress(psutil.Error):
            memory = max(memory, process.memory_info().rss)
        time.sleep(0.005)
    return time.perf_counter() - began, memory


def page(here: Path, lines: list[str]) -> tuple[float, int]:
    """The share of a core and the memory that the server takes while a run goes on and one tab listens."""
    folder = here / "runs" / "short"
    steps = [line for line in lines if '"type":"step"' in line]
    server = psutil.Popen(
        [sys.executable, "-m", "lapclip", "watch", "--web", "--port", str(PORT), "--json"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        page = json.loads(server.stdout.readline())["url"]  # it listens before it says where
        with (
            filelock.FileLock(folder / "lock"),
            open(folder / "events.jsonl", "a", encoding="utf-8") as file,
            urllib.request.urlopen(page.replace("/?", "/runs/short/events?")) as stream,
        ):
            stream.readline()
            before, began = server.cpu_times(), time.perf_counter()
            for number in range(int(SECONDS * 20)):
                file.write(steps[number % len(steps)] + "\n")
                file.flush()
                time.sleep(0.05)
            after, spent = server.cpu_times(), time.perf_counter() - began
        used = after.user + after.system - before.user - before.system
        return used / spent, server.memory_info().rss
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
