"""The application: all dialects, health, metrics and the pages, as FastAPI routes.

GET /health, /ready, /metrics
GET /          the page: the model, and a box to try it
GET /state     what it shows, as JSON
GET /page.css  and whatever else the page loads
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lapclip import __version__
from lapclip.errors import LapclipError
from lapclip.machine.system_memory import memory_bytes
from lapclip.serving.dialects import answer_refusal, json_answer, load_dialects
from lapclip.serving.dialects.immich import Upstream
from lapclip.serving.dialects.own import Demand
from lapclip.serving.folder_search import FolderSearch, search_routes
from lapclip.serving.refusals import Fault, Refusal, Unknown
from lapclip.serving.service import Service
from lapclip.web.server import answer_file, page_files


def make_app(
    service: Service, search: FolderSearch | None = None, immich_upstream: str | None = None
) -> FastAPI:
    """The application for a served model, and for the images of a folder. `Gate` stands before it.

    What Immich asks beside embeddings goes to the server at `immich_upstream`.
    """
    app = FastAPI(title="lapclip serve", version=__version__, docs_url=None, redoc_url=None)
    for dialect in load_dialects():
        app.include_router(dialect.routes(service))
    if search is not None:
        app.include_router(search_routes(search))
    app.state.immich_upstream = Upstream(immich_upstream) if immich_upstream else None

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["Health"], summary="Whether the process lives")
    async def health() -> Response:
        return json_answer({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get(
        "/ready", tags=["Health"], summary="Whether a golden image and caption get their vectors"
    )
    async def ready(demand: Demand = None) -> Response:
        service.check_demand(demand)
        await service.ready()
        service.check_demand(demand)  # another model may have been taken meanwhile
        model = service.model
        about = {
            "model": model.name,
            "fingerprint": model.fingerprint,
            "dimension": model.dimension,
        }
        return json_answer({"status": "ready", **about})

    @app.get("/metrics", tags=["Health"], summary="Counts and times in Prometheus' format")
    async def metrics() -> Response:
        return Response(
            service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    app.include_router(page_routes(service), include_in_schema=False)

    describe = app.openapi

    def description() -> dict[str, Any]:
        """Without FastAPI's own form of an error: each dialect has another."""
        found = describe()
        for methods in found["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            found.get("components", {}).get("schemas", {}).pop(name, None)
        return found

    setattr(app, "openapi", description)  # noqa: B010 (FastAPI's own way, which its types forbid)

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        return answer_refusal(request.scope, refusal)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return answer_refusal(request.scope, _as_refusal(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        refusal = Refusal(_about(request, error))
        refusal.status, refusal.code = (
            error.status_code,
            "not_found" if error.status_code == 404 else "invalid_request",
        )
        return answer_refusal(request.scope, refusal)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        reason = (
            error.message
            if isinstance(error, LapclipError)
            else f"A fault in lapclip: {type(error).__name__}."
        )
        return answer_refusal(request.scope, Fault(reason))

    return app


SHORT = {
    "missing": "this field is missing",
    "extra_forbidden": "there is no such field; /openapi.json has those that there are",
    "model_attributes_type": "it should be an object",
}
"""What pydantic finds, in fewer words."""


def _about(request: Request, error: HTTPException) -> str:
    """What is wrong with a path or a method, and what there is."""
    if error.status_code == 405 and (allowed := (error.headers or {}).get("Allow")):
        return f"This path takes {allowed}."
    if error.status_code == 404 and request.url.path == "/search":
        return "No folder is searched here: lapclip serve --search FOLDER does that."
    if error.status_code == 404:
        return "There is no such path; /openapi.json has those that there are."
    return str(error.detail)


def _as_refusal(error: RequestValidationError) -> Refusal:
    """The first fault that pydantic found, without what was sent."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Refusal("The request is no JSON.")
    field = ".".join(str(step) for step in first["loc"] if step != "body")
    if not field:
        return Refusal(
            "The request should be a JSON object, with the header Content-Type: application/json."
        )
    message = first["msg"].replace("Input should", "it should").replace(" after validation", "")
    return Refusal(f"{field}: {SHORT.get(first['type'], message)}.", field=field)


STATIC = Path(__file__).parent / "static"


def page_routes(service: Service) -> APIRouter:
    """Routes that browsers ask for."""
    router, files = APIRouter(), page_files(STATIC)

    @router.get("/")
    async def page(request: Request) -> Response:
        return answer_file(request, STATIC / "page.html")

    @router.get("/state")
    async def state() -> Response:
        return json_answer(describe_service(service))

    @router.get("/{name}.{ending}")
    async def page_file(request: Request, name: str, ending: str) -> Response:
        if (found := files.get(f"{name}.{ending}")) is None:
            raise Unknown("There is no such file.")
        return answer_file(request, found)

    return router


def describe_service(service: Service) -> dict[str, Any]:
    """Return what the page shows of the model and its queue."""
    model, (items, seconds) = service.model, service.load
    return {
        "queue": {"items": items, "seconds": seconds},
        "cache": {"hits": model.cache.hits, "misses": model.cache.misses},
        "memory_bytes": memory_bytes(),
        "notes": list(service.notes.values()),
        "model": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "engine": model.engine.name,
            "threads": model.engine.threads,
            "device": model.engine.device,
            "dimension": model.dimension,
            "since": model.since,
            "reasons": model.engine.reasons,
        },
    }
