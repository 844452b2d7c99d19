"""The server of images, asked over HTTP: what it tells, what it sends, and what it never sends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from lapclip.errors import DataError
from lapclip.searching import web as application
from lapclip.searching.library import open_library
from lapclip.searching.web import Questions, serve
from lapclip.searching.web import images as web_images

from ..conftest import command
from ..served import ending
from .album import BROKEN, ODD, Album, album, scene


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Iterator[Album]:
    place = tmp_path_factory.mktemp("shown")
    with album(place / "pictures", place / "data", trained) as found:
        (place / "secret.png").write_bytes(b"a secret")
        yield found


def names(answer: dict) -> list[str]:
    return [row["name"] for row in answer["results"]]


def test_words_find_what_the_library_finds(shown: Album) -> None:
    answer = shown.served.json("/search?words=" + quote("a red cat -snow"))
    expected = shown.library.find("a red cat -snow", 200)
    assert [row["number"] for row in answer["results"]] == [hit.number for hit in expected]
    assert [row["score"] for row in answer["results"]] == pytest.approx(
        [hit.score for hit in expected], abs=1e-3
    )
    assert answer["total"] == shown.library.count == len(answer["results"])
    assert answer["ms"] > 0


def test_without_a_question_the_newest_come_first(shown: Album) -> None:
    answer = shown.served.json("/search")
    times = [
        shown.library.path(entry).stat().st_mtime
        for entry in map(shown.library.entry, numbers(answer))
        if entry
    ]
    assert times == sorted(times, reverse=True)
    assert len(times) == shown.library.count
    assert {row["score"] for row in answer["results"]} == {None}


def numbers(answer: dict) -> list[int]:
    return [row["number"] for row in answer["results"]]


def test_names_that_are_no_text_are_told_and_served(shown: Album) -> None:
    name = os.fsdecode(BROKEN)
    if not os.path.exists(os.path.join(os.fsencode(shown.folder), BROKEN)):
        pytest.skip("this system does not allow such a name")
    number = shown.number(name)
    assert name in names(shown.served.json("/search"))
    assert shown.served.json(f"/images/{number}")["path"] == name
    assert shown.served.ask(f"/images/{number}/whole").status == 200


def test_more_like_an_image_leaves_it_out(shown: Album) -> None:
    number = shown.number("scene 4.png")
    answer = shown.served.json(f"/search?like={number}")
    assert numbers(answer) == [hit.number for hit in shown.library.like(number, 200)]
    assert answer["total"] == len(answer["results"]) == shown.library.count - 1
    unknown = shown.served.json("/search?like=999999")
    assert (unknown["results"], unknown["total"]) == ([], 0)


def test_parts_are_whole_and_do_not_overlap(shown: Album, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "PAGE", 7)
    asked = Questions(shown.library)
    pages = [asked.answer(asked.read({"words": "a house", "page": str(page)})) for page in range(5)]
    assert [len(page["results"]) for page in pages[:4]] == [7] * 4
    found = [number for page in pages for number in numbers(page)]
    assert found == [hit.number for hit in shown.library.find("a house", 1000)][: len(found)]
    assert {page["total"] for page in pages} == {shown.library.count}


def test_since_and_exclude_hold_for_the_whole_page(shown: Album) -> None:
    asked = Questions(shown.library, exclude=["scene*"])
    for question in ({}, {"words": "a house"}, {"like": str(shown.number("turned.jpg"))}):
        answer = asked.answer(asked.read(question))
        assert answer["total"] == len(answer["results"]) > 0
        assert not [name for name in names(answer) if name.startswith("scene")]
    hidden = {"like": str(shown.number("scene 4.png"))}
    for page in ("0", "1"):
        assert not asked.answer(asked.read({**hidden, "page": page}))["results"]
    nothing = Questions(shown.library, since=4e9)
    assert nothing.answer(nothing.read({}))["total"] == nothing.count == 0


def test_image_from_elsewhere_finds_itself(shown: Album) -> None:
    answer = shown.served.ask("/asked", (shown.folder / "scene 7.jpg").read_bytes())
    name = json.loads(answer.read())["image"]
    found = shown.served.json(f"/search?image={name}")
    assert names(found)[0] == "scene 7.jpg"
    assert found["results"][0]["score"] > 0.99
    preview = shown.served.ask(f"/asked/{name}")
    assert (preview.status, preview.headers["content-type"]) == (200, "image/jpeg")
    assert Image.open(io.BytesIO(preview.read())).size == (96, 96)


def test_what_is_no_question_is_refused_in_a_sentence(shown: Album) -> None:
    for path in ("/search?page=-1", "/search?page=x", "/search?page=99999", "/search?like=-1", "/search?like=x",
                 "/search?like=" + "9" * 40, "/search?image=unknown", "/search?words=" + "a" * 1001):  # fmt: skip
        answer = shown.served.ask(path)
        text = answer.read().decode()
        assert answer.status == 400, path
        assert text.endswith("."), text
    for body in (b"", b"no image", b"\x89PNG\r\n\x1a\n" + b"\x00" * 100):
        assert shown.served.ask("/asked", body).status == 400


def test_image_that_is_too_large_to_ask_by_is_refused(shown: Album) -> None:
    assert shown.served.ask("/asked", bytes(application.LARGEST_ASKED + 1)).status == 413


def test_facts_of_an_image(shown: Album) -> None:
    path = shown.folder / "turned.jpg"
    facts = shown.served.json(f"/images/{shown.number('turned.jpg')}")
    assert facts["path"] == "turned.jpg"
    assert (facts["name"], facts["width"], facts["height"]) == ("turned.jpg", 40, 60)
    assert (facts["bytes"], facts["taken"]) == (path.stat().st_size, None)
    assert facts["modified"] == pytest.approx(path.stat().st_mtime)


def test_small_images_are_upright_and_made_once(shown: Album) -> None:
    address = f"/images/{shown.number('turned.jpg')}/small"
    first = shown.served.ask(address)
    small = Image.open(io.BytesIO(first.read()))
    assert (first.headers["content-type"], small.format, small.size) == (
        "image/jpeg",
        "JPEG",
        (40, 60),
    )
    left, right = (small.convert("RGB").getpixel((x, 30)) for x in (5, 35))
    assert (np.array([left, right]) > 150).tolist() == [[True, False, False], [False, False, True]]
    large = shown.served.ask(f"/images/{shown.number('large.png')}/small")
    assert Image.open(io.BytesIO(large.read())).size == (
        web_images.SHORT_SIDE,
        web_images.SHORT_SIDE,
    )
    entry = shown.library.entry(shown.number("large.png"))
    assert entry
    kept = shown.library.index_path / "small" / entry.digest[:2] / f"{entry.digest}.jpg"
    Image.new("RGB", (3, 3)).save(kept)  # what is kept is what is sent
    again = shown.served.ask(f"/images/{shown.number('large.png')}/small")
    assert Image.open(io.BytesIO(again.read())).size == (3, 3)
    same = shown.served.ask(
        f"/images/{shown.number('large.png')}/small", If_None_Match=again.headers["etag"]
    )
    assert same.status == 304


def test_whole_images_are_sent_as_they_are_where_browsers_read_them(shown: Album) -> None:
    for name, kind in (("scene 2.png", "image/png"), ("turned.jpg", "image/jpeg")):
        answer = shown.served.ask(f"/images/{shown.number(name)}/whole")
        assert (answer.status, answer.headers["content-type"]) == (200, kind)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.read() == (shown.folder / name).read_bytes()
    converted = shown.served.ask(f"/images/{shown.number('paper.tiff')}/whole")
    image = Image.open(io.BytesIO(converted.read()))
    assert (converted.headers["content-type"], image.format, image.size) == (
        "image/jpeg",
        "JPEG",
        (96, 96),
    )


def test_heic_is_converted(shown: Album) -> None:
    pytest.importorskip("pillow_heif")
    for form in ("small", "whole"):
        answer = shown.served.ask(f"/images/{shown.number('phone.heic')}/{form}")
        assert (answer.status, answer.headers["content-type"]) == (200, "image/jpeg")
        assert Image.open(io.BytesIO(answer.read())).size == (96, 96)


@pytest.mark.parametrize("form", ["small", "whole"])
def test_file_that_went_or_changed_is_not_sent(shown: Album, form: str) -> None:
    path = shown.folder / "scene 9.jpg"
    number, before = shown.number("scene 9.jpg"), path.read_bytes()
    stamp = path.stat()

    def status() -> int:
        answer = shown.served.ask(f"/images/{number}/{form}")
        assert b"secret" not in answer.read()
        return answer.status

    assert status() == 200
    try:
        os.utime(path, (1, 1))  # the same bytes at another time
        assert status() == 200
        path.write_bytes(b"secret".ljust(len(before), b"."))  # other bytes, as many
        assert status() == 404
        path.unlink()
        assert status() == 404
        path.mkdir()
        assert status() == 404
        path.rmdir()
        if hasattr(os, "mkfifo"):  # opening it would wait for a writer
            os.mkfifo(path)
            assert status() == 404
            path.unlink()
        if sys.platform != "win32":
            path.symlink_to(shown.folder.parent / "secret.png")
            assert status() == 404
            path.unlink()
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert status() == 200


def test_nothing_but_the_index_has_an_address(shown: Album) -> None:
    secret = shown.folder.parent / "secret.png"
    for path in ("/images/0/small", "/images/999999/whole", "/images/-1/small", "/images/1e3/small",
                 f"/images/{2**70}/small", "/images/1.png/small", "/images/..%2f..%2fsecret.png/whole",
                 "/images/../../secret.png", "/images/%2e%2e/%2e%2e/secret.png", f"/images{secret}",
                 f"/images/{quote(str(secret), safe='')}/whole", "/images/scene%202.png/whole", "/secret.png",
                 "/..%2fsecret.png", "/%2e%2e/secret.png", "/page.html", "/application.py", "/static/page.js",
                 "/small/", "/images", "/images/", "/images/1/", "/pictures.db", "/asked/..%2fpage.html",
                 "/asked/unknown", "//search", "/search/"):  # fmt: skip
        answer = shown.served.ask(path)
        assert answer.status == 404, path
        assert b"secret" not in answer.read()


def test_only_an_image_to_ask_by_can_be_sent(shown: Album) -> None:
    for path in ("/", "/search", "/images/1", "/images/1/small", "/page.js"):
        assert shown.served.ask(path, b"").status == 405, path
    assert shown.served.ask("/asked").status in (404, 405)


def test_other_sites_and_names_are_refused(shown: Album) -> None:
    own, number = f"127.0.0.1:{shown.served.port}", shown.number("scene 2.png")
    for path in (
        "/",
        "/search",
        f"/images/{number}",
        f"/images/{number}/whole",
        f"/images/{number}/small",
    ):
        assert shown.served.ask(path, Host=own).status == 200
        assert shown.served.ask(path, Host="evil.example").status == 403
        assert shown.served.ask(path, Origin="http://evil.example").status == 403
        assert (
            shown.served.ask(path, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status
            == 403
        )
    assert shown.served.ask("/asked", b"x", Origin="http://evil.example").status == 403
    assert (
        shown.served.ask("/asked", b"x", Origin=f"http://{own}").status == 400
    )  # heard, and no image


def test_every_answer_carries_the_policy(shown: Album) -> None:
    for path in (
        "/",
        "/search",
        f"/images/{shown.number('scene 2.png')}/whole",
        "/page.js",
        "/nothing",
    ):
        headers = shown.served.ask(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_page_loads_everything_it_names_from_here(shown: Album) -> None:
    text = shown.served.ask("/").read().decode()
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', text))
    assert {"/base.css", "/page.css", "/page.js", "/theme.js"} <= named
    for path in list(named):
        if path.endswith(".js"):
            named |= {
                f"/{name}"
                for name in re.findall(r'from "\./([^"]+)"', shown.served.ask(path).read().decode())
            }
    assert len(named) > 9
    for path in named:
        assert shown.served.ask(path).status == 200, path


def test_a_token_is_needed(shown: Album) -> None:
    number = shown.number("scene 2.png")
    for path in (
        "/",
        "/search",
        f"/images/{number}",
        f"/images/{number}/whole",
        f"/images/{number}/small",
        "/page.js",
    ):
        refused = shown.served.ask(path, Cookie="")
        assert refused.status == 401
        assert b"lapclip search FOLDER --web" in refused.read()
    assert shown.served.ask("/asked", b"x", Cookie="").status == 401
    cookie = (
        shown.served.ask(f"/?token={shown.served.token}", Cookie="")
        .headers["set-cookie"]
        .split(";")[0]
    )
    assert shown.served.ask(f"/images/{number}/whole", Cookie=cookie).status == 200


def test_what_is_left_out_has_no_address(shown: Album) -> None:
    """One server for both filters: what is older, and what a glob leaves out."""
    hidden, old, young = (shown.number(name) for name in ("scene 4.png", "large.png", ODD[0]))
    with ending(shown.restarted("--exclude", "scene*", "--since", "2024-01-01")) as served:
        for number in (hidden, old):
            for path in (f"/images/{number}", f"/images/{number}/small", f"/images/{number}/whole"):
                answer = served.ask(path)
                assert answer.status == 404, path
                assert (
                    answer.read() == served.ask(path.replace(str(number), "999999")).read()
                )  # as if it were not
            assert served.json(f"/search?like={number}")["results"] == []
            assert served.ask(f"/images/{number}/small", If_None_Match="*").status == 404
        assert served.json(f"/images/{young}")["path"] == ODD[0]
        assert served.ask(f"/images/{young}/whole").status == 200
        page = served.ask("/").read().decode()
        assert str(shown.folder.parent) not in page


def test_page_follows_the_index(shown: Album, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process indexes while the page is open: what is new can be found, what went cannot."""
    monkeypatch.setenv("LAPCLIP_DATA", str(shown.data))
    new = shown.folder / "later.png"
    before = shown.served.json("/search")
    try:
        scene(9, 80).save(new)
        with contextlib.closing(open_library(shown.folder, str(shown.model))) as another:
            number = next(hit.number for hit in another.newest(another.count) if hit.path == new)
            after = until(
                lambda: shown.served.json("/search"), lambda answer: number in numbers(answer)
            )
            assert sorted(names(after)) == sorted([*names(before), "later.png"])
            assert after["count"] == after["total"] == before["total"] + 1
            assert after["reading"] > before["reading"]
            found = shown.served.json(f"/search?like={number}")
            assert len(found["results"]) == before["total"]
    finally:
        new.unlink(missing_ok=True)
    with contextlib.closing(open_library(shown.folder, str(shown.model))):
        until(
            lambda: shown.served.json("/search"), lambda answer: answer["count"] == before["count"]
        )
    assert numbers(shown.served.json("/search")) == numbers(before)


def until(ask: Callable[[], dict], done: Callable[[dict], bool]) -> dict:
    """The first answer that will do: the index is read at most once a second."""
    for _ in range(100):
        answer = ask()
        if done(answer):
            return answer
        time.sleep(0.1)
    raise AssertionError("the page does not follow")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")
def test_json_is_one_object_with_the_address_and_ctrl_c_is_the_way_to_end(shown: Album) -> None:
    arguments = command("search", str(shown.folder), "a red cat", "--model", str(shown.model), "--web", "--json",
                        "--port", "0")  # fmt: skip
    environment = {**os.environ, "LAPCLIP_DATA": str(shown.data)}
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout
        said = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    assert (process.returncode, rest) == (0, "")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}#words=a\+red\+cat", said["url"])
    assert said["address"] == said["url"]
    assert said["indexed"] == shown.library.count
    assert "Ctrl-C ends the page" in errors


def test_the_number_that_is_announced_is_without_what_is_left_out(
    shown: Album, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(
        application,
        "serve_until_interrupted",
        lambda _, words, *__, **___: titles.append(words.title),
    )
    serve(shown.library, exclude=["scene*"])
    left = shown.library.count_of(exclude=["scene*"])
    assert 0 < left < shown.library.count
    assert titles == [f"{left} images can be found at"]


def test_page_opens_on_an_image_or_says_that_it_is_none(shown: Album, tmp_path: Path) -> None:
    with ending(shown.restarted("--like", str(shown.folder / "scene 7.jpg"))) as served:
        name = served.fragment.removeprefix("image=")
        assert served.json(f"/search?image={name}")["results"][0]["name"] == "scene 7.jpg"
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(
        DataError, match=r"notes.txt cannot be read as an image: it is not an image"
    ):
        serve(shown.library, like=tmp_path / "notes.txt")


def test_small_images_beyond_the_limit_go_the_oldest_first(
    shown: Album, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = web_images.Images(shown.library)
    place = shown.library.index_path / "small"
    for at in range(3):
        path = place / f"z{at}" / f"z{at}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (at, at))
    total = sum(path.stat().st_size for path in place.glob("*/*.jpg"))
    monkeypatch.setattr(web_images, "MOST_CACHED", total - 1500)
    kept._make_room()
    assert [(place / f"z{at}" / f"z{at}.jpg").exists() for at in range(3)] == [False, False, True]
