"""The page's own files, and plotly.js out of the plotly package, which is never imported."""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from lapclip.errors import RunError

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page(names: Sequence[str]) -> bytes:
    """The page. It opens on the runs that were named."""
    text = (STATIC / "page.html").read_text(encoding="utf-8")
    return text.replace("{{runs}}", html.escape(json.dumps(list(names)))).encode()


def own_files() -> dict[str, Path]:
    """What the page loads, by its name. Nothing else of the disk has an address."""
    return {path.name: path for path in STATIC.iterdir() if path.suffix in (".css", ".js", ".svg")}


def plotly_file() -> Path:
    """plotly.js, as the plotly package carries it."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise RunError("The package plotly is not installed; it draws the charts.", hint="pip install plotly")
    return Path(found.origin).parent / "package_data" / "plotly.min.js"


def answer_file(request: Request, path: Path, *, max_age: int = 0) -> Response:
    """A file of ours. A browser that has it already is told so."""
    status = path.stat()
    tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
    headers = {"ETag": tag, "Cache-Control": f"private, max-age={max_age}" if max_age else "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return FileResponse(path, media_type=TYPES[path.suffix], headers=headers)
