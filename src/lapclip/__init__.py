"""lapclip: train, understand and ship CLIP on the computer you own.

    import lapclip
    run = lapclip.train(minutes=2)
    run.plot()
    model = lapclip.load("runs/first-run")
    model.encode_text("a red cat on the left, at night.")

Names load on first use, so that `import lapclip` is quick.
"""

import os
import sys

# As in `typing`. Nothing else is imported: `python -m lapclip` looks in the current folder until its first line ran.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from lapclip.api import (
        Evaluation,
        Interrupted,
        evaluate,
        export,
        open_run,
        resume,
        search,
        train,
        tune,
    )
    from lapclip.api.callbacks import Callback, StopTraining
    from lapclip.api.folder_search import FolderSearch, Found
    from lapclip.api.training_run import TrainingRun
    from lapclip.client import Client, connect
    from lapclip.embedder import Embedder, Encoder, load
    from lapclip.errors import LapclipError
    from lapclip.runs import events

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Client",
    "Embedder",
    "Encoder",
    "Evaluation",
    "FolderSearch",
    "Found",
    "Interrupted",
    "LapclipError",
    "StopTraining",
    "TrainingRun",
    "__version__",
    "connect",
    "evaluate",
    "events",
    "export",
    "load",
    "open_run",
    "resume",
    "search",
    "train",
    "tune",
]

# Here, because torch reads it when it is imported. With torch's own fallback an operation that MPS lacks would run on
# the CPU without a word, and a run would not know where it ran; without, it is an error that is handled and named.
os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] = "0"
# Also read once. Linux gives large pages to programs that ask for them, and with them the processor looks up fewer
# addresses: a step takes up to 5 % less time (docs/speed.md). Kernels that do not offer it would have torch warn.
try:
    with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as _setting:
        if "[madvise]" in _setting.read():
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
except (OSError, ValueError):
    pass
# OpenMP's threads spin while they wait for each other, by default for so long that two programs that share
# cores hardly advance (docs/speed.md). The library reads this when torch loads it: libgomp on Linux; libomp on
# macOS and Intel's on Windows (both unverified).
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    if sys.platform == "linux":
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # turns of a loop, about 0.2 ms
    else:
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # milliseconds

_HOMES = {
    "lapclip.api": (
        "Evaluation",
        "Interrupted",
        "evaluate",
        "export",
        "open_run",
        "resume",
        "search",
        "train",
        "tune",
    ),
    "lapclip.api.callbacks": ("Callback", "StopTraining"),
    "lapclip.api.folder_search": ("FolderSearch", "Found"),
    "lapclip.api.training_run": ("TrainingRun",),
    "lapclip.client": ("Client", "connect"),
    "lapclip.embedder": ("Embedder", "Encoder", "load"),
    "lapclip.errors": ("LapclipError",),
    "lapclip.runs": ("events",),
}
"""The names that each module is the home of."""


def __getattr__(name: str) -> "Any":
    for home, names in _HOMES.items():
        if name in names:
            import importlib

            module = importlib.import_module(home)
            return (
                importlib.import_module(f"{home}.{name}")
                if name == "events"
                else getattr(module, name)
            )
    raise AttributeError(f"module 'lapclip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
