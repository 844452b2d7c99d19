"""The page at `/` (how the server does, and a box to try it), and the page at `/docs` that tries any request.

GET /          the page
GET /state     what it shows, as JSON
GET /docs      the requests of `/openapi.json`, to be tried in Swagger UI, whose files come with a package
GET /page.css  and whatever else the pages load
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lapclip.serving.dialects import json_answer
from lapclip.serving.refusals import Unknown
from lapclip.serving.service import Service
from lapclip.web.security import POLICY
from lapclip.web.server import answer_file, page_files

STATIC = Path(__file__).parent / "static"
A_DAY = 86_400
SWAGGER = ("swagger-ui.css", "swagger-ui-bundle.js")


def page_routes(service: Service) -> APIRouter:
    """Routes that browsers ask for."""
    router, files = APIRouter(), page_files(STATIC)

    @router.get("/")
    async def page(request: Request) -> Response:
        return answer_file(request, STATIC / "page.html")

    @router.get("/state")
    async def state() -> Response:
        return json_answer(service.metrics.snapshot(service))

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        answer = answer_file(request, STATIC / "docs.html")
        # Swagger UI writes styles into its elements. Its scripts are files like ours.
        answer.headers["Content-Security-Policy"] = POLICY.replace(
            "style-src 'self'", "style-src 'self' 'unsafe-inline'"
        )
        return answer

    @router.get("/docs/{name}")
    async def docs_file(request: Request, name: str) -> Response:
        folder = _swagger_folder()
        if name not in SWAGGER or folder is None:
            raise Unknown("There is no such file.")
        return answer_file(request, folder / name, max_age=A_DAY)

    @router.get("/{name}.{ending}")
    async def page_file(request: Request, name: str, ending: str) -> Response:
        if (found := files.get(f"{name}.{ending}")) is None:
            raise Unknown("There is no such file.")
        return answer_file(request, found)

    return router


def _swagger_folder() -> Path | None:
    """Where the package with Swagger UI keeps its files; the package itself is not imported."""
    found = find_spec("fastapi_swagger")
    return Path(found.origin).parent / "resources" if found is not None and found.origin is not None else None
