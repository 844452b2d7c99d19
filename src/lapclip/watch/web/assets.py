"""The page itself, and plotly.js out of the plotly package, which is never imported."""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from lapclip.errors import RunError

STATIC = Path(__file__).parent / "static"


def page(names: Sequence[str]) -> bytes:
    """The page. It opens on the runs that were named."""
    text = (STATIC / "page.html").read_text(encoding="utf-8")
    return text.replace("{{runs}}", html.escape(json.dumps(list(names)))).encode()


def plotly_file() -> Path:
    """plotly.js, as the plotly package carries it."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise RunError("The package plotly is not installed; it draws the charts.", hint="pip install plotly")
    return Path(found.origin).parent / "package_data" / "plotly.min.js"
