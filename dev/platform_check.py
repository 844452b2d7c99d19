"""Try on this computer what lapclip's authors could not: Macs, Windows, GPUs that are not NVIDIA's.

    dev/mac_check.sh            macOS and Linux: sets up an environment of its own, then runs this
    dev/windows_check.ps1       the same for Windows
    python dev/platform_check.py [--minutes 10] [--only NAME ...]

Ten minutes at most. Each check is one that `docs/platforms.md` names. What cannot be tried here is skipped with the
reason, and nothing counts as tried that was not. Ends with one block to paste into an issue; home folders in it are
shortened to ~, and nothing is sent anywhere. Exit status 1 where a check failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
MAC, WINDOWS = sys.platform == "darwin", sys.platform == "win32"
SYSTEM = "macOS" if MAC else "Windows" if WINDOWS else platform.system()
PLAIN = [
    "model.name=tiny",
    "data.train_pairs=256",
    "train.batch_size=32",
    "train.steps=40",
    "train.dtype=float32",
    "train.image_attention=fused",
    "train.text_attention=fused",
    "train.linear=torch",
]
"""A run of seconds in which nothing is chosen by timing, so that two of them can be compared."""
ODD_WORDS = [
    "plain",
    "two words",
    "it's",
    'say "x"',
    "$HOME 100% of C:\\my photos\\",
    "a&b|c<d>e^f(g)",
    "[red];*?",
    "",
]


class Failed(Exception):
    """What was seen is not what should be."""


class Skipped(Exception):
    """It cannot be tried here, and why."""


@dataclass
class Check:
    name: str
    about: str
    seconds: float
    """What it may take at most."""
    run: Callable[[Here], str]


class Here:
    """The folder in which everything happens, and the time that is left."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.end = folder, time.monotonic() + 60 * minutes
        self.limit = 60.0 * minutes
        self.accelerator = ""
        self.environment = {
            **os.environ,
            "LAPCLIP_CACHE": str(folder / "cache"),
            "LAPCLIP_DATA": str(folder / "data"),
            "PYTHONUTF8": "1",
            "NO_COLOR": "1",
        }

    def lapclip(self, *arguments: str, status: int | None = 0) -> Any:
        """Run a command with --json and give its object."""
        done = self.run([sys.executable, "-m", "lapclip", *arguments, "--json"])
        if status is not None and done.returncode != status:
            raise Failed(
                f"lapclip {' '.join(arguments)[:60]} ended with {done.returncode}: {last(done.stderr)}"
            )
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise Failed(f"lapclip {arguments[0]} --json printed {done.stdout[:80]!r}") from None

    def train(self, name: str, *settings: str) -> Any:
        return self.lapclip(
            "train", "--name", name, *(w for s in [*PLAIN, *settings] for w in ("--set", s))
        )

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        limit = min(self.limit, self.end - time.monotonic())
        try:
            return subprocess.run(
                command, cwd=self.folder, env=self.environment, capture_output=True, text=True,
                encoding="utf-8", errors="replace", timeout=max(1.0, limit), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Failed(
                f"{' '.join(command[-3:])[:60]} did not end within {limit:.0f} s"
            ) from None

    def output(self, *command: str) -> str:
        """What a program of the system prints."""
        found = shutil.which(command[0])
        return self.run([found, *command[1:]]).stdout.strip() if found else "not there"

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on until it is told to end, with a console or a session of its own."""
        apart: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            apart = {"creationflags": subprocess.CREATE_NEW_CONSOLE}
        process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, *arguments], cwd=self.folder, env=self.environment, text=True,
            encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, **apart,
        )  # fmt: skip
        try:
            yield process
        finally:
            with suppress(
                psutil.Error
            ):  # what it started would else go on, and hold its output open
                for one in [
                    *psutil.Process(process.pid).children(recursive=True),
                    psutil.Process(process.pid),
                ]:
                    one.kill()
            process.communicate()

    def events(self, run: str, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / run / "events.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["type"] == kind]

    def losses(self, run: str) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events(run, "step")}

    def wait(self, what: str, done: Callable[[], Any], seconds: float = 120.0) -> Any:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if found := done():
                return found
            time.sleep(0.1)
        raise Failed(f"{what}: not within {seconds:.0f} s")

    def needs_accelerator(self) -> str:
        if not self.accelerator:
            raise Skipped("torch finds no GPU here")
        return self.accelerator


def machine(here: Here) -> str:
    """What the system tells, and whether the parts that have to be parsed were understood."""
    found = here.lapclip("machine")
    here.accelerator = next(
        (one["kind"] for one in found["accelerators"] if one["kind"] in ("mps", "xpu", "cuda")), ""
    )
    wanted = ["chip", "memory_bytes", "physical_cores"]
    wanted += ["power_source", "low_power_mode", "features"] if MAC or WINDOWS else []
    wanted += ["performance_cores"] if MAC else []
    if missing := [name for name in wanted if found[name] in (None, [], "")]:
        raise Failed(f"not known: {', '.join(missing)}")
    names = (
        "chip",
        "physical_cores",
        "performance_cores",
        "efficiency_cores",
        "memory_bytes",
        "power_source",
    )
    more = "low_power_mode", "throttled", "watts", "energy_reason", "torch"
    accelerators = (
        ", ".join(f"{one['kind']} {one['name']}" for one in found["accelerators"]) or "none"
    )
    return "; ".join(
        [f"accelerators {accelerators}", *(f"{name} {found[name]}" for name in (*names, *more))]
    )


def system_words(here: Here) -> str:
    """The programs whose output is parsed, as they speak on this system."""
    if MAC:
        names = (
            "machdep.cpu.brand_string",
            "hw.perflevel0.physicalcpu",
            "hw.perflevel1.physicalcpu",
            "hw.memsize",
        )
        power = [
            line.strip()
            for line in here.output("pmset", "-g").splitlines()
            if "powermode" in line.lower()
        ]
        said = [here.output("sysctl", *names), *power, here.output("pmset", "-g", "batt")]
        said.append(here.output("pmset", "-g", "therm"))
    elif WINDOWS:
        said = [here.output("powercfg", "/getactivescheme")]
    else:
        raise Skipped("known on Linux")
    return " / ".join(" ".join(each.split()) for each in said)


CANARY = """
import json
from lapclip.machine.choose_device import accelerator_here
device = accelerator_here()
print(json.dumps([[result.ok, result.sentence()] for result in device.examine()]))
"""


def canary(here: Here) -> str:
    """Does the GPU compute what it should?"""
    kind = here.needs_accelerator()
    done = here.run([sys.executable, "-c", CANARY])
    if done.returncode:
        raise Failed(last(done.stderr))
    results = json.loads(done.stdout.splitlines()[-1])
    wrong = [sentence for ok, sentence in results if not ok]
    text = f"{len(results) - len(wrong)} of {len(results)} on {kind}"
    if any("float32" in sentence for sentence in wrong):
        raise Failed(f"{text}; {'; '.join(wrong)}")
    return "; ".join([text, *wrong])


def gpu_learns_as_cpu(here: Here) -> str:
    kind = here.needs_accelerator()
    here.train("on-cpu", "train.device=cpu")
    outcome = here.train("on-gpu", f"train.device={kind}")
    cpu, gpu = here.losses("on-cpu"), here.losses("on-gpu")
    off = max(abs(gpu[step] / cpu[step] - 1) for step in cpu)
    seen = f"losses differ by {off:.1e} at most; places {outcome['places']}; {outcome['pairs_per_second']:.0f} pairs/s"
    if off > 0.02:
        raise Failed(seen)
    return seen


def half_precision(here: Here) -> str:
    kind = here.needs_accelerator()
    needs_run(here, "on-cpu", "train.device=cpu")
    said = []
    for dtype in ("float16", "bfloat16"):
        outcome = here.train(f"in-{dtype}", f"train.device={kind}", f"train.dtype={dtype}")
        losses = here.losses(f"in-{dtype}")
        final, whole = losses[max(losses)], here.losses("on-cpu")[40]
        said.append(
            f"{dtype} {final:.3f} (float32 {whole:.3f}), {outcome['pairs_per_second']:.0f} pairs/s"
        )
        if not math.isfinite(final) or abs(final / whole - 1) > 0.1:
            raise Failed("; ".join(said))
    return "; ".join(said)


def compiled(here: Here) -> str:
    kind = here.needs_accelerator()
    needs_run(here, "on-cpu", "train.device=cpu")
    outcome = here.train("compiled", f"train.device={kind}", "train.compile=compiled")
    final, whole = here.losses("compiled")[40], here.losses("on-cpu")[40]
    seen = f"loss {final:.3f} (plain {whole:.3f}), {outcome['pairs_per_second']:.0f} pairs/s"
    if abs(final / whole - 1) > 0.05:
        raise Failed(seen)
    return seen


def compare(here: Here) -> str:
    """The figure a Mac is asked for most."""
    if not here.accelerator:
        raise Skipped("torch finds no GPU here to compare the CPU with")
    found = here.lapclip("compare", "--quick")
    return " ".join(
        str(found.get("recommendation") or found.get("recommendations") or list(found)).split()
    )[:400]


def first_run(here: Here) -> str:
    """What a new user does, with everything chosen by measuring."""
    found = here.lapclip("train", "--minutes", "1", "--name", "first")
    metrics = found["evaluation"]
    return (
        f"device {', '.join(map(str, found['devices']))}; t2i R@1 {metrics['t2i_r1']:.1%}, "
        f"{found['pairs_per_second']:.0f} pairs/s, peak {found['peak_memory_bytes'] / 1e9:.2f} GB"
    )


def after_training(here: Here) -> str:
    needs_run(here, "first")
    for arguments in (
        ["eval", "first"],
        ["report", "first"],
        ["doctor", "first"],
        ["runs"],
        ["clean"],
    ):
        here.lapclip(*arguments)
    here.lapclip("export", "first", "--to", "openclip")
    return "eval, report, doctor, runs, clean, export"


def odd_names(here: Here) -> str:
    """Names with spaces, accents (which macOS decomposes) and letters beyond Windows' old code pages."""
    needs_run(here, "first")
    from PIL import Image

    folder = here.folder / "Fotos für Zoë, 東京"
    folder.mkdir(exist_ok=True)
    for name, colour in (("café rouge.png", "red"), ("ein 'Bild'.png", "blue")):
        Image.new("RGB", (64, 64), colour).save(folder / name)
        (folder / name).with_suffix(".txt").write_text(f"a {colour} wall\n", encoding="utf-8")
    found = here.lapclip("search", str(folder), "a red wall", "--model", "first")
    if found["indexed"] != 2 or not all(Path(each["path"]).is_file() for each in found["results"]):
        raise Failed(f"indexed {found['indexed']} of 2, found {found['results']}")
    checked = here.lapclip(
        "data", "check", str(folder), "--recipe", "first-run", "--set", "model.name=tiny"
    )
    if checked["images"] != 2:
        raise Failed(f"data check sees {checked['images']} of 2 images")
    return "2 of 2 indexed, found and checked"


def killed(here: Here) -> str:
    """A run that is killed goes on to the same losses, bit for bit."""
    needs_run(here, "on-cpu", "train.device=cpu")
    words = [
        w
        for s in [*PLAIN, "train.device=cpu", "train.checkpoint_every_seconds=0"]
        for w in ("--set", s)
    ]
    with here.started("-m", "lapclip", "train", "--name", "killed", *words) as process:
        here.wait(
            "step 10",
            lambda: len(here.events("killed", "step")) >= 10 or process.poll() is not None,
        )
        process.kill()
    reached = max(here.losses("killed"), default=0)
    here.lapclip("resume", "killed")
    if here.losses("killed") != here.losses("on-cpu"):
        raise Failed("the losses differ from those of a run that was not killed")
    return f"killed at step {reached} of 40, resumed to the same 40 losses, bit for bit"


INTERRUPT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: None)
process = subprocess.Popen(sys.argv[2:])
while not os.path.exists(sys.argv[1]) and process.poll() is None:
    time.sleep(0.1)
os.kill(0, signal.CTRL_C_EVENT if os.name == "nt" else signal.SIGINT)  # all that share the console, or the session
sys.exit(process.wait())
"""


def interrupted(here: Here) -> str:
    """Ctrl-C, as a console or a terminal sends it."""
    words = [w for s in [*PLAIN, "train.steps=100000"] for w in ("--set", s)]
    now = here.folder / "interrupt now"
    command = [sys.executable, "-m", "lapclip", "train", "--name", "interrupted", *words]
    with here.started("-c", INTERRUPT, str(now), *command) as process:
        here.wait(
            "step 5",
            lambda: len(here.events("interrupted", "step")) >= 5 or process.poll() is not None,
        )
        now.touch()
        status = process.wait(120)
    rows = {row["name"]: row["state"] for row in here.lapclip("runs")["runs"]}
    if rows.get("interrupted") != "stopped" or status != 130:
        raise Failed(f"exit status {status}, the run is {rows.get('interrupted')}")
    return f"exit status {status}, the run is stopped and can be resumed"


def background(here: Here) -> str:
    """A run without a terminal, that keeps the computer awake and ends when it is asked to."""
    words = [w for s in [*PLAIN, "train.steps=100000"] for w in ("--set", s)]
    here.lapclip("train", "--background", "--name", "behind", *words)
    here.wait("step 5", lambda: len(here.events("behind", "step")) >= 5)
    awake = "not asked (only an administrator may)" if WINDOWS else "no way to ask"
    if MAC:
        assertions = here.output("pmset", "-g", "assertions")
        awake = "yes" if "caffeinate" in assertions else "NO: caffeinate has no assertion"
    here.lapclip("stop", "behind")
    rows = {row["name"]: row["state"] for row in here.lapclip("runs")["runs"]}
    if rows.get("behind") != "stopped" or awake.startswith("NO"):
        raise Failed(f"kept awake: {awake}; the run is {rows.get('behind')}")
    return f"kept awake: {awake}; stopped when asked"


def web_pages(here: Here) -> str:
    needs_run(here, "first")
    said = []
    for name, arguments in (("watch", ["watch", "first", "--web"]), ("serve", ["serve", "first"])):
        if name == "serve" and importlib.util.find_spec("fastapi") is None:
            said.append("serve skipped (no fastapi)")
            continue
        with here.started("-m", "lapclip", *arguments, "--json") as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise Failed(f"lapclip {name} ended")
            browser = urllib.request.build_opener(
                urllib.request.HTTPCookieProcessor()
            )  # the token becomes a cookie
            with browser.open(json.loads(line)["url"], timeout=30) as answer:
                said.append(f"{name} {answer.status}")
    return ", ".join(said)


def shells(here: Here) -> str:
    """Is a suggested command, typed as it is printed, the command that was meant?"""
    sys.path.insert(0, str(ROOT / "src"))
    from lapclip.suggest import quoted

    show = here.folder / "show words.py"
    show.write_text("import sys, json; print(json.dumps(sys.argv[1:]))\n", encoding="utf-8")
    ways = {"bash": ["-c"], "zsh": ["-c"]}
    words = ODD_WORDS
    if WINDOWS:
        ways = {"cmd": ["/d", "/s", "/c"], "powershell": ["-NoProfile", "-Command"]}
        words = [word for word in ODD_WORDS if word and not set(word) & set('"`$%')]
    line = " ".join(["python", quoted(str(show)), *map(quoted, words)])
    said, wrong = [], []
    for shell, options in ways.items():
        program = shutil.which(shell)
        if program is None:
            continue
        # cmd reads its line as it is; a list would be quoted for a program that it is not.
        command: Any = [program, *options, line]
        if shell == "cmd":
            command = f'"{program}" /d /s /c "{line}"'
        done = here.run(command)
        got = json.loads(done.stdout) if done.stdout.startswith("[") else last(done.stderr)
        said.append(shell)
        if got != words:
            wrong.append(f"{shell} gives {got}")
    if wrong:
        raise Failed("; ".join(wrong))
    return ", ".join(said)


def exports(here: Here) -> str:
    needs_run(here, "first")
    said = []
    for kind, module in (("onnx", "onnxscript"), ("coreml", "coremltools")):
        if importlib.util.find_spec(module) is None:
            said.append(f"{kind} skipped (no {module})")
            continue
        found = here.lapclip("export", "first", "--to", kind)
        said.append(
            f"{kind} {found['recall_before']} to {found['recall_after']}, {found['ms_after']} ms"
        )
    if all("skipped" in each for each in said):
        raise Skipped("; ".join(said))
    return "; ".join(said)


def tests(here: Here) -> str:
    """The tests of the parts that talk to the system."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    rooms = [
        "machine",
        "runs",
        "cli",
        "test_paths.py",
        "test_suggest.py",
        "test_apple.py",
    ]
    paths = [str(ROOT / "tests" / room) for room in rooms]
    options = [
        "-q",
        "-n",
        "2",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "no:cacheprovider",
    ]
    done = here.run([sys.executable, "-m", "pytest", *options, *paths])
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    if done.returncode:
        raise Failed(f"{last(done.stdout)}: {', '.join(failed)}")
    return last(done.stdout)


def needs_run(here: Here, name: str, *settings: str) -> None:
    """A run that an earlier check made; made now where that was left out."""
    if not (here.folder / "runs" / name).is_dir():
        here.train(name, *settings)


CHECKS = [
    Check("machine", "chip, cores, memory, power and GPUs are known", 60, machine),
    Check("system words", "sysctl, pmset and powercfg speak as expected", 30, system_words),
    Check("canary", "the GPU computes what it should", 90, canary),
    Check("gpu and cpu", "the GPU learns what the CPU learns", 120, gpu_learns_as_cpu),
    Check("half precision", "float16 and bfloat16 learn on the GPU", 120, half_precision),
    Check("first run", "lapclip train, with everything chosen by measuring", 180, first_run),
    Check("after training", "the commands that follow", 90, after_training),
    Check("odd names", "folders and files with spaces, accents and 東京", 60, odd_names),
    Check("killed", "a killed run goes on to the same losses", 180, killed),
    Check("interrupted", "Ctrl-C ends a run in order", 90, interrupted),
    Check("background", "a run without a terminal keeps the computer awake", 90, background),
    Check("web pages", "watch --web and serve answer", 90, web_pages),
    Check("shells", "suggested commands can be typed as they are printed", 30, shells),
    Check("exports", "ONNX and Core ML give the same answers", 120, exports),
    Check("compiled", "torch.compile on the GPU", 120, compiled),
    Check("compare", "lapclip compare --quick", 150, compare),
    Check("tests", "the tests of what talks to the system", 150, tests),
]


def main() -> int:
    options = parsed()
    rows: list[tuple[str, str, float, str]] = []
    with tempfile.TemporaryDirectory(prefix="lapclip-check-", ignore_cleanup_errors=True) as folder:
        here = Here(Path(folder), options.minutes)
        chosen = [
            check
            for check in CHECKS
            if not options.only or check.name in (*options.only, "machine")
        ]
        for number, check in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {check.name}: {check.about} ...", end=" ", flush=True)
            result, seconds, seen = tried(check, here)
            print(
                f"{result}, {seconds:.0f} s" + (f": {shortened(seen)}" if result != "ok" else ""),
                flush=True,
            )
            rows.append((check.name, result, seconds, shortened(seen)))
        with suppress(OSError):
            os.chdir(ROOT)
    print(f"\nPlease paste what follows into an issue:\n\n{block(rows)}")
    return 1 if any(result == "FAILED" for _, result, _, _ in rows) else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Try on this computer what lapclip's authors could not."
    )
    parser.add_argument(
        "--minutes", type=float, default=10, help="all checks together, at most (default 10)"
    )
    parser.add_argument(
        "--only", action="append", choices=[check.name for check in CHECKS], help="may be repeated"
    )
    return parser.parse_args()


def tried(check: Check, here: Here) -> tuple[str, float, str]:
    """How a check ended: ok, skipped or FAILED, with its seconds and what was seen."""
    started = time.monotonic()
    here.limit = check.seconds
    if here.end - started < 5:
        return "skipped", 0.0, "no time left: --minutes gives more"
    try:
        result, seen = "ok", check.run(here)
    except Skipped as reason:
        result, seen = "skipped", str(reason)
    except Exception as error:
        result, seen = (
            "FAILED",
            f"{'' if isinstance(error, Failed) else f'{type(error).__name__}: '}{error}",
        )
    return result, time.monotonic() - started, seen


def block(rows: list[tuple[str, str, float, str]]) -> str:
    """What is pasted: the computer in words, and a table."""
    release = (
        platform.mac_ver()[0] if MAC else platform.version() if WINDOWS else platform.release()
    )
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("lapclip", "torch", "numpy")
    ]
    about = [
        f"{SYSTEM} {release} {platform.machine()}",
        f"Python {platform.python_version()}",
        *versions,
        *commit(),
    ]
    counted = ", ".join(
        f"{[row[1] for row in rows].count(each)} {each}" for each in ("ok", "FAILED", "skipped")
    )
    lines = ["### lapclip platform check", "", ", ".join(about), "", f"**{counted}**", ""]
    lines += ["| check | result | s | seen |", "|---|---|---|---|"]
    cells = (
        (name, result, f"{seconds:.0f}", seen.replace("|", "\\|"))
        for name, result, seconds, seen in rows
    )
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def commit() -> list[str]:
    if (git := shutil.which("git")) is None:
        return []
    done = subprocess.run(
        [git, "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return [] if done.returncode else [f"commit {done.stdout.strip()}"]


def shortened(text: str) -> str:
    """On one line, without the names of home folders."""
    return " ".join(text.replace(str(Path.home()), "~").split())[:600]


def last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was said"


if __name__ == "__main__":
    sys.exit(main())
