"""`lapclip search`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.model import have_model
from lapclip.cli.output import Common, emit, typed
from lapclip.errors import SearchError
from lapclip.suggest import command
from lapclip.text import to_json

if TYPE_CHECKING:
    from rich.table import Table

    from lapclip.searching.indexes import KnownIndex
    from lapclip.searching.library import Hit, Library

LIMIT = 10
BAR_CELLS = 8
BAR_NOTE = (
    "Bars compare these images only: full is the best match, empty an average image of the folder."
)
LISTED = 5
"""Unreadable images that are shown by name."""


def search(
    folder: Path,
    query: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *,
    like: Annotated[Path | None, Parameter(show_default=False)] = None,
    limit: int = LIMIT,
    since: Annotated[str | None, Parameter(show_default=False)] = None,
    exclude: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    model: Annotated[str | None, Parameter(show_default=False)] = None,
    device: str = "auto",
    web: Annotated[bool, Parameter(negative="")] = False,
    port: Annotated[int | None, Parameter(show_default=False)] = None,
    host: str = "127.0.0.1",
    forget: Annotated[bool, Parameter(negative="")] = False,
    yes: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Find images on your own disk by what is on them, in words or by another image.

    What is new or changed under the folder is indexed first; Ctrl-C stops that, and the same command goes on. There is
    one index for each model; they lie in your data directory, and nothing is written into the folder. Without QUERY it
    only indexes. Hidden files and the folders of runs are left out.

    For example:

    - `lapclip search photos/`
    - `lapclip search photos/ "a red bicycle in the snow"`
    - `lapclip search photos/ "beach -people" --since 2024-05-01 --exclude "screenshots/*"`
    - `lapclip search photos/ --like cat.jpg --limit 5`
    - `lapclip search photos/ --web`
    - `lapclip search photos/ "a dog" --model vit-b-32-laion2b`
    - `lapclip search photos/ "a dog" --model ViT-B-32.pt --json`
    - `lapclip search photos/ --forget`

    Parameters
    ----------
    folder
        The images to search, with all folders in it.
    query
        What to look for; `-word` and `-"two words"` are what not to look for. The path of an image works too.
    like
        Find images like this one. Example: lapclip search photos/ --like cat.jpg
    limit
        How many to show. Example: lapclip search photos/ "a dog" --limit 50
    since
        Only images from this date on, or younger than this age, by the date in the photo or else of the file.
        Examples: --since 2024-05-01, --since 30d, --since 2w, --since 6m, --since 1y
    exclude
        Leave out images whose path in the folder, or a part of it, is like this; may be repeated. Example: lapclip
        search photos/ "a dog" --exclude "screenshots" --exclude "*.png"
    model
        A run's name or folder, a folder or file with a model, a published one by its name (`lapclip models` lists
        them), or hf:org/name on the Hugging Face hub. Without one: the model that made the index of this folder, of
        several the one used last; else the newest finished run that learned from images. Example: lapclip
        search photos/ "a dog" --model vit-b-32-laion2b
    device
        Where to compute: auto, cpu, cuda, mps, xpu. Example: lapclip search photos/ "a dog" --device cpu
    web
        Show it in a browser instead, at an address that is printed: results come as you type. Example: lapclip search
        photos/ --web
    port
        Where the page is served; without it, 8865 or the next free one. Example: lapclip search photos/ --web --port
        9000
    host
        Address the page is served at; without it, only this computer reaches it. The address that is printed holds a
        token: who has it can look. Example: lapclip search photos/ --web --host 0.0.0.0
    forget
        List the indexes of the folder with their sizes, or remove that of --model; images are not touched. Example: lapclip search photos/ --forget --model heads
    yes
        Fetch a published model without asking. Example: lapclip search photos/ --model vit-b-32-laion2b --yes
    """
    from lapclip.data.find_images import is_image
    from lapclip.searching.query import check_question, parse, parse_since

    began = time.monotonic()
    if forget:
        if query is not None or like is not None or web:
            raise SearchError(
                "--forget removes an index and answers nothing.",
                hint=command("search", folder, "--forget"),
            )
        return _forget(folder, model, common)
    if query is not None and not folder.exists() and Path(query).is_dir():
        raise SearchError(
            f"There is no folder {folder}, and {query} is one: the folder comes first.",
            hint=typed(command("search", query, folder)),
        )
    check_question(query, like, limit)
    oldest = parse_since(since) if since is not None else None
    if like is None and query is not None and is_image(query) and Path(query).is_file():
        like, query = Path(query), None
    if query is not None and query.startswith("--"):  # one dash is a word that is not wanted
        raise SearchError(f"Unknown option: {query}.", hint="lapclip search --help")
    if query is not None and is_image(query):
        raise SearchError(
            f"There is no image {query}.", hint="an image's path, or words without such an ending"
        )

    with loading():
        from lapclip.searching.library import Answer, open_library
        from lapclip.searching.update_index import check_folder
        from lapclip.which_model import NoModel, for_photos

    check_folder(folder.absolute())
    have_model(model, yes=yes)
    with display() as shown:
        shown.waiting("reading the model")
        try:
            library = open_library(
                folder, model, shown.counting("indexing"), device=device, waiting=shown.waiting
            )
        except NoModel as error:
            words: list[object] = [folder]
            if query is not None:
                words.append(query)
            again = typed(command("search", *words, "--model"))
            raise NoModel(error.message, hint=for_photos(again)) from None
    if web:
        return _serve(
            library, host, port, common, query=query or "", like=like, since=oldest, exclude=exclude
        )
    asked = time.monotonic()
    answer = Answer([])
    if like is not None:
        answer = Answer(library.like_image(like, limit, 0, oldest, exclude))
    elif query is not None:
        answer = library.ask(parse(query), limit, 0, oldest, exclude)
    hits, asked_for = answer.hits, query is not None or like is not None
    said = library.notes_on(answer) if asked_for else library.model_notes()
    result = {
        "results": [
            {"path": str(hit.path), "score": hit.score, "number": hit.number} for hit in hits
        ],
        "correction": answer.correction,
        "indexed": library.count,
        "seconds": time.monotonic() - began,
        "query_seconds": time.monotonic() - asked,
        "added": library.update.added,
        "moved": library.update.moved,
        "removed": library.update.removed,
        "unreadable": [
            {"path": path, "reason": reason} for path, reason in library.update.unreadable
        ],
        "folder": str(library.folder),
        "model": str(library.model.which.path),
        "why_model": library.model.which.why,
        "index": str(library.index_path),
        "said": said,
        "notes": library.update.notes,
    }
    lines = [
        *_about(library, said),
        _next_step(library, folder, model, is_answer=asked_for, hits=hits),
    ]
    if common and common.json:
        emit(result, [], common)
        return 0
    if hits:
        _print_hits(hits)
        lines.insert(0, f"[dim]{BAR_NOTE}[/dim]")
    emit(result, lines, common)
    return 0


def _forget(folder: Path, model: str | None, common: Common | None) -> int:
    """List the indexes of a folder, or remove those of a model."""
    from lapclip.searching.indexes import indexes_of, named, remove
    from lapclip.text import printable, size

    known = indexes_of(folder)
    before = [one.to_dict() for one in known]  # with their sizes, while they are there
    chosen = named(known, model) if model is not None else []
    if model is None and not (common and common.json):
        emit({}, _listed(folder, known), common)
    for one in chosen:
        remove(one)
    gone = {str(one.path) for one in chosen}
    result = {
        "folder": str(folder.absolute()),
        "indexes": [one for one in before if one["path"] not in gone],
        "removed": [one for one in before if one["path"] in gone],
    }
    lines = [
        f"Removed the index of {escape(printable(one.name))}, {size(one.bytes)}." for one in chosen
    ]
    if known and not chosen:
        words = known[-1].forget_command().removeprefix("lapclip ")
        lines = ["Nothing was removed.", f"Next: {escape(printable(typed(words)))}"]
    emit(result, lines, common)
    return 0


def _listed(folder: Path, known: list[KnownIndex]) -> list[str | Table]:
    """Return a table of the indexes of a folder, the one that was used last first."""
    from datetime import datetime

    from rich.table import Table

    from lapclip.text import count, printable, size

    if not known:
        return [f"There is no index of {escape(printable(folder))}."]
    table = Table("model", "images", "size", "last used", box=None, pad_edge=False)
    for one in known:
        used = datetime.fromtimestamp(one.used).strftime("%Y-%m-%d %H:%M")
        name = one.name + (", which is gone" if one.maker_is_gone else "")
        table.add_row(escape(printable(name)), count(one.images), size(one.bytes), used)
    return [table]


def _serve(
    library: Library, host: str, port: int | None, common: Common | None, **asked: Any
) -> int:
    """Say what there is, then the address; with --json the object says it, and lines for people go to stderr."""
    from rich.console import Console

    from lapclip.searching.web import serve

    output = sys.stderr if common and common.json else None
    console = Console(highlight=False, file=output)
    for line in _about(library, library.model_notes()):
        console.print(line, soft_wrap=True)

    def ready(address: str) -> None:
        if common and common.json:
            print(
                to_json({"url": address, "address": address, "indexed": library.count}), flush=True
            )

    serve(library, host, port, output=output, ready=ready, **asked)
    return 0


def _about(library: Library, said: list[str]) -> list[str]:
    """What there is, what could not be read, and what the model is worth."""
    from lapclip.text import printable
    from lapclip.which_model import ASKED

    found = library.update
    news = [
        (found.added, "new or changed"),
        (found.moved, "renamed or copied"),
        (found.removed, "gone"),
    ]
    changes = ", ".join(f"{count:,} {what}" for count, what in news if count)
    lines = [f"[dim]{library.count:,} images indexed{f' ({changes})' if changes else ''}[/dim]"]
    lines += [f"[yellow]{escape(printable(note))}[/yellow]" for note in found.notes]
    if found.unreadable:
        lines.append(f"[yellow]{len(found.unreadable):,} could not be read:[/yellow]")
        lines += [
            f"  {escape(printable(path))}: {escape(printable(reason))}"
            for path, reason in found.unreadable[:LISTED]
        ]
        if len(found.unreadable) > LISTED:
            lines.append(f"  and {len(found.unreadable) - LISTED:,} more; --json lists them all")
    which = library.model.which
    why = "" if which.why == ASKED else f": {which.why}"
    lines.append(f"[dim]model {escape(printable(which.path))}{why}[/dim]")
    return lines + [f"[dim]{escape(printable(sentence))}[/dim]" for sentence in said]


def _next_step(
    library: Library, folder: Path, model: str | None, *, is_answer: bool, hits: list[Hit]
) -> str:
    """Return the next useful command, or why there are no images."""
    from lapclip.text import path_from_here

    if is_answer and not library.count:
        return "There are no images to find."
    if is_answer and not hits:
        return "No image is left by --since and --exclude."
    question = ["a dog on a beach"]
    if hits:
        question = ["--like", path_from_here(hits[0].path)]
    words = ["search", folder, *question]
    if model:
        words += ["--model", model]
    return f"Next: {escape(typed(command(*words)))}"


def _bar(filled: float, encoding: str) -> str:
    """Return a bar of characters that the output can encode."""
    full, empty = ("█", "░") if encoding.startswith("utf") else ("#", "-")
    cells = round(filled * BAR_CELLS)
    return full * cells + empty * (BAR_CELLS - cells)


def _print_hits(hits: list[Hit]) -> None:
    from rich.console import Console

    from lapclip.text import path_from_here, printable

    console = Console(highlight=False)
    for hit in hits:
        bar = _bar(hit.bar or 0.0, console.encoding)
        console.print(
            f"{bar}  {hit.score:6.3f}  {escape(printable(path_from_here(hit.path)))}",
            soft_wrap=True,
        )
