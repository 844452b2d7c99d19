"""Many scenes drawn by several processes: drawing is Python's own work, of which threads do one piece at a time.

Each process is given every n-th scene, and writes the bytes of its images one after the other. It imports no torch, and
is gone before training begins. What a process does not deliver is drawn here, so that nothing depends on them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple

import numpy as np

from lapclip.data.scenes import Scene
from lapclip.data.scenes.drawing import draw
from lapclip.machine.facts import logical_cores, python

WORTH_A_PROCESS, MOST_PROCESSES = 400, 16
"""Scenes that take longer to draw than a process to start, and the most that are started."""


def draw_all(
    scenes: Sequence[Scene], side: int, first_seed: int, processes: int | None = None
) -> Iterator[np.ndarray]:
    """The image of each scene, in order; their seeds follow each other."""
    if processes is None:
        processes = min(logical_cores(), MOST_PROCESSES, len(scenes) // WORTH_A_PROCESS)
    with ExitStack() as stack:
        helpers: list[subprocess.Popen[bytes]] = []
        with suppress(OSError):  # a system that starts no more of them
            for at in range(processes if processes > 1 else 0):
                helper = stack.enter_context(_start_helper())
                stack.callback(helper.kill)  # one that is done does not mind
                _ask(helper, scenes[at::processes], side, [first_seed + at, processes])
                helpers.append(helper)
        for at, scene in enumerate(scenes):
            data = (
                _read(helpers[at % processes], 3 * side * side)
                if len(helpers) > at % max(1, processes)
                else b""
            )
            if len(data) == 3 * side * side:
                yield np.frombuffer(data, dtype=np.uint8).reshape(side, side, 3)
            else:
                yield draw(scene, side, first_seed + at)


def _start_helper() -> subprocess.Popen[bytes]:
    """A process that draws, with the modules of this one, whose folders may have been named from another folder."""
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if os.path.isabs(path))
    }
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        python("-m", __name__), stdin=pipe, stdout=pipe, stderr=nowhere, env=found
    )


def _ask(
    helper: subprocess.Popen[bytes], scenes: Sequence[Scene], side: int, seeds: list[int]
) -> None:
    """Have a process draw some scenes; `seeds` are the first one's and how far they are apart."""
    request = {"scenes": [astuple(scene) for scene in scenes], "side": side, "seeds": seeds}
    assert helper.stdin is not None
    with suppress(OSError):  # one that has ended already delivers nothing
        helper.stdin.write(json.dumps(request).encode())
        helper.stdin.close()


def _read(helper: subprocess.Popen[bytes], size: int) -> bytes:
    assert helper.stdout is not None
    return helper.stdout.read(size)


def main() -> None:
    """Draw what is asked for on stdin, and write it to stdout."""
    asked = json.loads(sys.stdin.buffer.read())
    first, step = asked["seeds"]
    with suppress(BrokenPipeError, KeyboardInterrupt):
        for at, scene in enumerate(asked["scenes"]):
            sys.stdout.buffer.write(draw(Scene(*scene), asked["side"], first + at * step).tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
