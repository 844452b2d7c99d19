"""Packages that some formats need and that lapclip does without elsewhere."""

from __future__ import annotations

from importlib.util import find_spec

from lapclip.errors import WeightsError

EXTRAS = {"onnx": "export", "onnxscript": "export", "onnxruntime": "export", "coremltools": "coreml"}


def needs(*packages: str) -> None:
    """Refuse, in one line that says what to install, where a package is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise WeightsError(f"This needs {' and '.join(missing)}.", hint=f'pip install "lapclip[{EXTRAS[missing[0]]}]"')
