"""`lapclip serve`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lapclip.cli.output import Common


def serve(
    model: Annotated[str | None, Parameter(show_default=False)] = None,
    /,
    *,
    port: Annotated[int | None, Parameter(show_default=False)] = None,
    host: str = "127.0.0.1",
    api_key_file: Annotated[Path | None, Parameter(show_default=False)] = None,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
    threads: Annotated[int | None, Parameter(show_default=False)] = None,
    cache: Annotated[int, Parameter(show_default=False)] = 64,
    common: Common | None = None,
) -> int:
    """Serve a model over HTTP, in the dialects that clients already speak.

    For example:

    - `lapclip serve`

    Parameters
    ----------
    model
        A run's name or folder, a folder or file with a model, or an exported folder.
    """
    from lapclip.embedder import load
    from lapclip.serving.app import make_app
    from lapclip.serving.engine import Engine
    from lapclip.serving.gate import Gate
    from lapclip.serving.metrics import Metrics
    from lapclip.serving.service import Limits, ServedModel, Service
    from lapclip.web.server import Announcement, serve_until_interrupted
    from lapclip.which_model import which_model

    which = which_model(model)
    engine = Engine("torch-float32", load(which.path), threads or 1)
    engine.measure()
    limits = Limits(cache_bytes=cache * 1_000_000)
    metrics = Metrics()
    service = Service(ServedModel(name or which.name, engine, limits.cache_bytes, metrics.batch), limits, metrics)
    key = api_key_file.read_text().strip() if api_key_file else None
    announcement = Announcement("lapclip serve", f"{service.model.name}", "", "Ctrl-C ends it.")

    def ready(url: str) -> None:
        if common and common.json:
            line = {
                "url": url,
                "model": service.model.name,
                "fingerprint": service.model.fingerprint,
                "engine": engine.name,
            }
            print(json.dumps(line), flush=True)

    serve_until_interrupted(
        make_app(service),
        announcement,
        host,
        port,
        8871,
        output=sys.stderr,
        ready=ready,
        guard=lambda app, door: Gate(app, service, door, key),
        token=key is not None,
        connections=limits.connections,
        patience=round(limits.deadline),
    )
    return 0
