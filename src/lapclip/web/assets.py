"""The files that pages load, and plotly.js. Nothing else of the disk has an address."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from lapclip.errors import RunError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

SHARED = Path(__file__).parent / "static"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_files(static: Path) -> dict[str, Path]:
    """What a page loads, by its name: what all pages share, and its own."""
    return {
        path.name: path
        for folder in (SHARED, static)
        for path in folder.iterdir()
        if path.suffix in (".css", ".js", ".svg")
    }


def answer_file(request: Request, path: Path, *, max_age: int = 0) -> Response:
    """A file of ours. A browser that has it already is told so."""
    from starlette.responses import FileResponse, Response  # reports need plotly.js, and no web server

    status = path.stat()
    tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
    headers = {"ETag": tag, "Cache-Control": f"private, max-age={max_age}" if max_age else "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return FileResponse(path, media_type=TYPES[path.suffix], headers=headers)


def plotly_file() -> Path:
    """plotly.js, as the plotly package carries it. The package itself is never imported: that takes a second."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise RunError("The package plotly is not installed; it draws the charts.", hint="pip install plotly")
    return Path(found.origin).parent / "package_data" / "plotly.min.js"
