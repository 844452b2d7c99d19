"""The server that people write: FastAPI and OpenCLIP, one request a forward, with our weights. For the peers' Python:

    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/serving_plain.py MODEL --port 8000 [--threads]

It answers the same bodies as ours at `/v1/embeddings`. Handlers are `async`, so that one request is worked on at a
time; with --threads they are plain functions, which FastAPI runs in threads. `serving.py` takes the faster.
"""

from __future__ import annotations

import argparse
import base64
import io

import torch
import uvicorn
from fastapi import FastAPI
from openclip import open_clip, peer_model
from PIL import Image
from pydantic import BaseModel

from lapclip.embedder import load_torch


class Embeddings(BaseModel):
    model: str
    input: list[str]
    modality: str = "text"
    encoding_format: str = "float"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours = load_torch(options.model).model
    model = peer_model(ours).eval()
    preprocess = open_clip.transform.image_transform(ours.shape.image_size, is_train=False)
    tokenizer = open_clip.SimpleTokenizer(context_length=ours.shape.context)

    def embed(asked: Embeddings) -> dict:
        rows = []
        for item in asked.input:
            with torch.no_grad():
                if asked.modality == "image":
                    image = Image.open(io.BytesIO(base64.b64decode(item.partition(",")[2])))
                    features = model.encode_image(preprocess(image).unsqueeze(0))
                else:
                    features = model.encode_text(tokenizer([item]))
                rows.append((features / features.norm(dim=-1, keepdim=True))[0])
        if asked.encoding_format == "base64":
            given = [base64.b64encode(row.numpy().tobytes()).decode() for row in rows]
        else:
            given = [row.tolist() for row in rows]
        return {
            "data": [{"index": at, "embedding": row} for at, row in enumerate(given)],
            "model": asked.model,
        }

    async def embed_at_once(asked: Embeddings) -> dict:
        return embed(asked)

    app = FastAPI()
    app.post("/v1/embeddings")(embed if options.threads else embed_at_once)
    embed_at_once.__annotations__ = embed.__annotations__ = {"asked": Embeddings, "return": dict}
    app.get("/ready")(lambda: {"ready": True})
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
