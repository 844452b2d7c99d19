"""`lapclip serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from lapclip.cli.display import display, loading
from lapclip.cli.model import have_model
from lapclip.cli.output import Common
from lapclip.text import to_json

EngineName = Literal[
    "torch-float32", "torch-bfloat16", "torch-float16", "onnx-float32", "onnx-int8"
]


def serve(
    model: Annotated[str | None, Parameter(show_default=False)] = None,
    /,
    *,
    port: Annotated[int | None, Parameter(show_default=False)] = None,
    host: str = "127.0.0.1",
    api_key_file: Annotated[Path | None, Parameter(show_default=False)] = None,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
    engine: Annotated[EngineName | None, Parameter(show_default=False)] = None,
    threads: Annotated[int | None, Parameter(show_default=False)] = None,
    cache: int = 64,
    allow_host: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    deadline: float = 30.0,
    search: Annotated[Path | None, Parameter(show_default=False)] = None,
    allow_urls: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    immich: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    immich_upstream: Annotated[str | None, Parameter(show_default=False)] = None,
    follow: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    yes: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Serve a model over HTTP, in the dialects that clients already speak.

    The engine (torch or ONNX Runtime, its precision, its threads, how many requests are joined) is chosen by measuring
    at the first start, and remembered. Ctrl-C and SIGTERM let what was accepted be answered; a second one does not
    wait.

    For example:

    - `lapclip serve`
    - `lapclip serve first-run --port 9000 --follow`
    - `lapclip serve runs/first-run/exported/onnx-int8`
    - `lapclip serve vit-b-32-laion2b`
    - `lapclip serve heads --search photos/ --api-key-file key.txt`
    - `lapclip serve --host 0.0.0.0 --api-key-file key.txt --allow-host clip.example.org`

    Parameters
    ----------
    model
        A run's name or folder, a folder or file with a model, an exported ONNX folder, a published one by its name
        (`lapclip models` lists them), or hf:org/name on the Hugging Face hub; without one, the newest run with a
        model.
    port
        Where it listens; without it, 8871 or the next free one. Example: lapclip serve --port 9000
    host
        Address it listens at; without it, only this computer reaches it. Any other needs --api-key-file. Example:
        lapclip serve --host 0.0.0.0 --api-key-file key.txt
    api_key_file
        A file with the key that callers send, as `Authorization: Bearer KEY` or `X-API-Key: KEY`; one line of 16
        characters or more. Example: lapclip serve --api-key-file key.txt
    name
        What callers see as the model's name; without it, the run's. Example: lapclip serve --name my-clip
    engine
        Compute with this engine instead of the fastest. onnx-float32 and onnx-int8 need an export that was made from
        this model. int8 is never taken by itself, because its vectors do not compare with the model's own. Example:
        lapclip serve --engine onnx-int8
    threads
        Threads of the engine, instead of as many as serve fastest. Example: lapclip serve --threads 1
    cache
        Megabytes for vectors of texts and images that were asked before; 0 is none. Example: lapclip serve --cache 0
    allow_host
        A name that callers use for this server, as behind a proxy; may be repeated. It takes a key. Example: lapclip
        serve --allow-host clip.example.org --api-key-file key.txt
    deadline
        Seconds from the arrival of a request to its answer, up to 3600; later it is refused. Example: lapclip serve
        --deadline 5
    search
        Answer /search over the images of this folder, indexed first as `lapclip search` does. It takes a key.
        Example: lapclip serve --search photos/ --api-key-file key.txt
    allow_urls
        Fetch images that are given by their address: public https alone. Example: lapclip serve --allow-urls
    immich
        Answer Immich's /predict without a key, because Immich cannot send one: for networks that you trust. Example:
        lapclip serve --immich --host 0.0.0.0 --api-key-file key.txt
    immich_upstream
        Where Immich's requests for faces and text go: its own machine-learning server. Example: lapclip serve --immich
        --immich-upstream http://127.0.0.1:3003
    follow
        Take a newer model as soon as the run has one: opened and checked beside the old one, and no request fails.
        Example: lapclip serve first-run --follow
    yes
        Fetch a published model without asking. Example: lapclip serve vit-b-32-laion2b --yes
    """
    with loading():
        from lapclip.commands import serve as command

    options = command.ServeOptions(
        model=model,
        port=port,
        host=host,
        api_key_file=api_key_file,
        name=name,
        engine=engine,
        threads=threads,
        cache_megabytes=cache,
        allow_hosts=allow_host,
        follow=follow,
        deadline=deadline,
        search=search,
        allow_urls=allow_urls,
        immich=immich,
        immich_upstream=immich_upstream,
    )
    as_json = (lambda line: print(to_json(line), flush=True)) if common and common.json else None
    with command.taking_hangups() as hangups:
        have_model(model, yes=yes)
        with display() as shown:
            opened = command.open_service(
                options, shown.doing, shown.counting("indexing"), shown.waiting
            )
        command.serve(opened, hangups, as_json)
    return 0
