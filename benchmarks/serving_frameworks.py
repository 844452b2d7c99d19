"""What a web framework costs a request: three servers that read a body of `/v1/embeddings` and answer a fixed vector.

    .venv/bin/python benchmarks/serving_frameworks.py starlette|fastapi|fastapi-response --port 8000

`starlette` reads JSON and looks at nothing; `fastapi` validates the body with pydantic and gives its answer as bytes;
`fastapi-response` also validates the answer. `serving.py --rows frameworks` asks them in turns.
"""

import argparse
import base64
import json

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

VECTOR = base64.b64encode(bytes(4 * 512)).decode()


class Embeddings(BaseModel):
    model: str
    input: str | list[str]
    modality: str = "text"
    encoding_format: str = "float"


class Row(BaseModel):
    index: int
    embedding: str | list[float]


class Answer(BaseModel):
    data: list[Row]
    model: str


def answered(items: int) -> dict:
    return {"data": [{"index": at, "embedding": VECTOR} for at in range(items)], "model": "x"}


def as_bytes(items: int) -> Response:
    return Response(json.dumps(answered(items)), media_type="application/json")


async def plain(request: Request) -> Response:
    return as_bytes(len((await request.json())["input"]))


async def ready(request: Request) -> Response:
    return Response("ready")


async def validated(asked: Embeddings) -> Response:
    return as_bytes(len(asked.input))


async def validated_twice(asked: Embeddings) -> dict:
    return answered(len(asked.input))


def application(name: str) -> Starlette:
    """The server of that name."""
    if name == "starlette":
        return Starlette(
            routes=[Route("/v1/embeddings", plain, methods=["POST"]), Route("/ready", ready)]
        )
    app = FastAPI(routes=[Route("/ready", ready)])
    if name == "fastapi":
        app.post("/v1/embeddings")(validated)
    else:
        app.post("/v1/embeddings", response_model=Answer)(validated_twice)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=["starlette", "fastapi", "fastapi-response"])
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    uvicorn.run(
        application(options.name),
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
        access_log=False,
    )
