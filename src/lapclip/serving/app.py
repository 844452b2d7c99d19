"""The application: all dialects, health, metrics and the page, as FastAPI routes."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lapclip import __version__
from lapclip.errors import LapclipError
from lapclip.serving.dialects import answer_refusal, json_answer, load_dialects
from lapclip.serving.dialects.immich import Upstream
from lapclip.serving.refusals import Fault, Refusal
from lapclip.serving.service import Service


def make_app(service: Service, *, immich_upstream: str | None = None) -> FastAPI:
    """The application for a served model. `Gate` stands before it.

    What Immich asks beside embeddings goes to the server at `immich_upstream`.
    """
    app = FastAPI(title="lapclip serve", version=__version__, docs_url=None, redoc_url=None)
    for dialect in load_dialects():
        app.include_router(dialect.routes(service))
    app.state.immich_upstream = Upstream(immich_upstream) if immich_upstream else None

    @app.get("/health", summary="Whether the process lives")
    async def health() -> Response:
        return json_answer({"status": "ok"})

    @app.get("/ready", summary="Whether a golden image and caption get their vectors")
    async def ready() -> Response:
        await service.ready()
        model = service.model
        return json_answer({"status": "ready", "model": model.name, "fingerprint": model.fingerprint})

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        return answer_refusal(request.scope, refusal)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return answer_refusal(request.scope, _as_refusal(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        refusal = Refusal(str(error.detail))
        refusal.status, refusal.code = error.status_code, "not_found" if error.status_code == 404 else "invalid_request"
        return answer_refusal(request.scope, refusal)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        reason = error.message if isinstance(error, LapclipError) else f"A fault in lapclip: {type(error).__name__}."
        return answer_refusal(request.scope, Fault(reason))

    return app


def _as_refusal(error: RequestValidationError) -> Refusal:
    """The first fault that pydantic found, without what was sent."""
    first = error.errors()[0]
    steps = [str(step) for step in first["loc"] if step != "body"]
    field = ".".join(steps) or None
    message = first["msg"] if first["type"] != "json_invalid" else "The request is no JSON."
    return Refusal(f"{field}: {message}" if field else str(message), field=field)
