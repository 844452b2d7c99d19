"""lapclip: train, understand and ship CLIP on the computer you own.

    import lapclip
    model = lapclip.load("runs/first-run")
    model.encode_text(["a red cat on the left, at night."])

Names load on first use, so that `import lapclip` is quick.
"""

import os

# As in `typing`. Nothing else is imported: `python -m lapclip` looks in the current folder until its first line ran.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from lapclip.client import connect
    from lapclip.embedder import Embedder, load
    from lapclip.errors import LapclipError

__version__ = "0.1.0"
__all__ = ["Embedder", "LapclipError", "__version__", "connect", "load"]

# Here, because torch reads it when it is imported. With torch's own fallback an operation that MPS lacks would run on
# the CPU without a word, and a run would not know where it ran; without, it is an error that is handled and named.
os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] = "0"

_HOMES = {
    "Embedder": "lapclip.embedder",
    "LapclipError": "lapclip.errors",
    "connect": "lapclip.client",
    "load": "lapclip.embedder",
}


def __getattr__(name: str) -> "Any":
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lapclip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
