"""Whatever a file holds, there comes a table or an error that a person can read; and every record is accounted for."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from lapclip.config import DataConfig
from lapclip.data.check_data import inspect_images
from lapclip.data.packed_store import MIDDLE, pack, store_folder
from lapclip.data.pixels import View
from lapclip.data.sources import read_table
from lapclip.data.table import ImageFile, ImageInTar, Table
from lapclip.errors import LapclipError
from tests.conftest import examples
from tests.data.sources.made import captions_in, check_account, image_bytes, make_images

SHORT = settings(max_examples=examples(50))
NAMES = ("a.png", "images/b.png", "c.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("damage"), *NAMES)


def attempt(config: DataConfig) -> Table | LapclipError:
    try:
        return read_table(config)
    except LapclipError as error:
        return error


def survive(path: Path, content: bytes, **more: str) -> Table | None:
    """Read a file of this content: a table that keeps its promises, or an error of one to three lines."""
    path.write_bytes(content)
    found = attempt(DataConfig(source=str(path), **more))  # pyright: ignore[reportArgumentType]
    if isinstance(found, LapclipError):
        assert 1 <= len(str(found).splitlines()) <= 3, str(found)
        assert len(str(found)) < 1000
        return None
    table = found
    check_account(table)
    root = path.parent.resolve()
    for row in table.rows:
        assert row.image.read()
        assert root in (root / row.image.name.split(":")[0]).resolve().parents
    return table


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """A good file with some bytes changed, a piece taken out or put in, and its end cut off."""
    place = st.integers(0, len(whole))
    change = st.tuples(place, st.integers(0, 40), st.binary(max_size=12))

    def damage(changes: list[tuple[int, int, bytes]], end: int) -> bytes:
        content = whole
        for start, length, new in changes:
            content = content[:start] + new + content[start + length :]
        return content[:end]

    return st.builds(
        damage, st.lists(change, min_size=1, max_size=4), st.one_of(st.just(1 << 30), place)
    )


GOOD_TABLE = b'filepath,caption,split\na.png,"a dog, running",train\nimages/b.png,a cat,val\nc.png,"say ""hi""",test\n'


@SHORT
@given(
    content=st.one_of(
        st.binary(max_size=300),
        damaged(GOOD_TABLE),
        st.text(max_size=200).map(lambda t: t.encode("utf-16")),
    )
)
@example(content=b'a.png,"\x00')
@example(content=b"\xff\xfe\x00")
@example(content=b"\xff\xfe\x00\xd8\x00\xd8,\x00")
@example(content=b"a.png\x85,x\x85\xc2\x85b.png,y")
def test_any_bytes_as_a_table(folder: Path, content: bytes) -> None:
    survive(folder / "x.csv", content)


# Rows whose fate is known: each is one record, whatever its neighbours are.
WORDS = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters='"'), max_size=20
)
QUOTED = st.text(st.sampled_from('ab ,"\n;é'), max_size=20)
IMAGE = st.sampled_from(
    [*NAMES, "gone.png", "../up.png", "/etc/x.png", "C:\\x.png", "./a.png", "images\\b.png"]
)
ROW = st.one_of(
    st.tuples(IMAGE, WORDS).map(lambda row: f"{row[0]},{row[1]}"),
    st.tuples(IMAGE, QUOTED).map(lambda row: _written(*row)),
    st.tuples(IMAGE, st.sampled_from(['"open', 'end"', 'a "b" c', '"a" b', '"', '""', ""])).map(
        ",".join
    ),
    st.sampled_from(["a.png", "no image at all", "a.png,one,two,three"]),
)


def _written(*cells: str) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="", quoting=csv.QUOTE_ALL).writerow(cells)
    return file.getvalue()


@SHORT
@example(rows=["a.png,0"] * 4, end="\n")
@given(rows=st.lists(ROW, max_size=12), end=st.sampled_from(["\n", "\r\n"]))
def test_every_row_of_a_table_is_kept_repeated_or_named(
    folder: Path, rows: list[str], end: str
) -> None:
    lines = [
        "image,caption",
        "a.png,a first row that is good",
        *rows,
        "c.png,a last row that is good",
    ]
    table = survive(folder / "x.csv", end.join(lines).encode(), separator="comma")
    assert table is not None
    assert table.records == len(rows) + 2
    assert captions_in(table) + table.repeated + len(table.skipped) == len(rows) + 2
    assert {"a.png", "c.png"} <= {row.image.name for row in table.rows}


VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(NAMES)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["images", "annotations", "file_name", "filename", "caption", "sentences", "raw", "id",
                             "image_id", "split", "text", "a.png"]), inner, max_size=4),
    ),
    max_leaves=12,
)  # fmt: skip
GOOD_COCO = json.dumps(
    {
        "images": [{"id": 1, "file_name": "a.png"}],
        "annotations": [{"image_id": 1, "caption": "a dog"}],
    }
).encode()
GOOD_KARPATHY = json.dumps(
    {
        "images": [
            {
                "filename": "a.png",
                "split": "restval",
                "sentences": [{"raw": "a dog"}, {"raw": "the dog"}],
            }
        ]
    }
).encode()


@SHORT
@given(
    content=st.one_of(
        VALUE.map(lambda value: json.dumps(value).encode()),
        damaged(GOOD_COCO),
        damaged(GOOD_KARPATHY),
    )
)
@example(content=b"[" * 200_000)
@example(content=b'{"a.png": "\\ud800 x"}')
@example(content=b'{"\\ud800.png": "x", "a.png": "y"}')
@example(content=b"9" * 10_000)
@example(
    content=b'{"images": [{"id": 1e400, "file_name": "a.png"}], "annotations": [{"caption": NaN}]}'
)
def test_any_json(folder: Path, content: bytes) -> None:
    survive(folder / "x.json", content)


@SHORT
@given(
    images=st.lists(VALUE, max_size=4),
    annotations=st.lists(VALUE, max_size=4),
    sentences=st.lists(VALUE, max_size=4),
)
def test_every_entry_of_coco_and_karpathy_is_accounted_for(
    folder: Path, images, annotations, sentences
) -> None:
    good = {"id": "good", "file_name": "a.png"}
    content = {
        "images": [good, *images],
        "annotations": [{"image_id": "good", "caption": "a dog"}, *annotations],
    }
    table = survive(folder / "x.json", json.dumps(content).encode())
    assert table is not None
    assert table.records >= 1 + len(annotations)
    kept = [{"filename": "a.png", "sentences": [{"raw": "a dog"}, *sentences]}, *images]
    table = survive(folder / "x.json", json.dumps({"images": kept}).encode())
    assert table is not None
    assert table.records >= 1 + len(sentences) + len(images)


LINE = st.one_of(
    VALUE.map(json.dumps),
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20),
    st.tuples(IMAGE, st.text(max_size=9)).map(
        lambda row: json.dumps({"file_name": row[0], "text": row[1]})
    ),
)


@SHORT
@given(lines=st.lists(LINE, max_size=10))
def test_every_json_line_is_accounted_for(folder: Path, lines: list[str]) -> None:
    good = '{"file_name": "a.png", "text": "a good row"}'
    table = survive(
        folder / "x.jsonl",
        "\n".join([good, *lines]).encode(),
        picture_column="file_name",
        caption_column="text",
    )
    assert table is not None
    assert table.records >= 1 + sum(
        bool(line.strip()) for line in lines
    )  # a line may hold a list of captions


def _tar(members: list[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as shard:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    return file.getvalue()


GOOD_TAR = _tar([(f"{n}.{ending}", content) for n in range(3) for ending, content in
                 (("png", image_bytes(n)), ("txt", b"a dog"), ("json", b'{"caption": "a cat"}'))])  # fmt: skip
LONG_TAR = _tar([("x" * 150 + ".png", image_bytes()), ("x" * 150 + ".txt", b"a dog")])


@SHORT
@given(content=st.one_of(damaged(GOOD_TAR), damaged(LONG_TAR), st.binary(max_size=1200)))
def test_any_tar(folder: Path, content: bytes) -> None:
    survive(folder / "x.tar", content)


def _header(name: bytes, size: bytes, kind: bytes) -> bytes:
    header = bytearray(512)
    header[: len(name)] = name
    header[124 : 124 + len(size)] = size
    header[156:157] = kind
    header[257:263] = b"ustar\0"
    header[148:156] = b" " * 8
    header[148:155] = b"%06o\0" % sum(header)
    return bytes(header)


@SHORT
@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from(
                [b"a.png", b"a.txt", b"../a.png", b"/a.txt", b"a.json", b"", b"\xff.png", b"."]
            ),
            st.one_of(
                st.sampled_from(
                    [
                        b"0",
                        b"5",
                        b"-5",
                        b"777",
                        b"77777777777",
                        b"\x80\0\0\0\0\0\0\0\0\0\0\5",
                        b"\xff" * 12,
                    ]
                ),
                st.binary(max_size=12),
            ),
            st.sampled_from(
                [
                    b"0",
                    b"\0",
                    b"1",
                    b"2",
                    b"3",
                    b"5",
                    b"6",
                    b"7",
                    b"L",
                    b"K",
                    b"x",
                    b"g",
                    b"S",
                    b"Z",
                ]
            ),
            st.one_of(
                st.binary(max_size=600),
                st.sampled_from([b"30 path=../../x.png\n", b"12 size=-99\n", b"0 x\n"]),
            ),
        ),
        max_size=6,
    )
)
def test_any_headers_in_a_tar(folder: Path, parts: list[tuple[bytes, bytes, bytes, bytes]]) -> None:
    padded = [
        _header(name, size, kind) + body + bytes(-len(body) % 512)
        for name, size, kind, body in parts
    ]
    survive(folder / "x.tar", b"".join(padded))


@SHORT
@given(
    groups=st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, 3),
            st.booleans(),
            st.sampled_from(["{}", "{}.1", "v1.{}", "photo.{}.large", "{}.png", "f.o/{}", "{}..x"]),
            st.sampled_from([None, b"{}", b'{"split": "te']),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_every_pair_of_a_tar_is_kept_or_named(folder: Path, groups: list[tuple]) -> None:
    members, expected = [("good.png", image_bytes()), ("good.txt", b"fine")], 1
    for number, (has_image, captions, escapes, form, fields) in enumerate(groups):
        stem = ("../" if escapes else "") + form.format(number)
        members += [(f"{stem}.png", image_bytes(number))] * has_image
        text = "\n".join(f"caption {n}" for n in range(captions))
        members += [(f"{stem}.txt", text.encode())]
        members += [(f"{stem}.json", fields)] if fields else []
        if escapes:
            expected += has_image + 1 + bool(fields)
        else:
            expected += max(1, captions) if has_image and fields in (None, b"{}") else 1
    table = survive(folder / "x.tar", _tar(members))
    assert table is not None
    assert table.records == expected


@SHORT
@given(content=st.binary(max_size=200))
def test_any_bytes_beside_an_image(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = make_images(tmp_path_factory.mktemp("beside"), "a.png", "b.png")
    (folder / "a.txt").write_bytes(content)
    (folder / "b.txt").write_bytes(b"a good caption")
    check_account(read_table(DataConfig(source=str(folder))))


@pytest.mark.skipif(sys.platform == "win32", reason="a file with a hole takes a setting there")
def test_an_oversized_file_is_left_out_and_named(tmp_path: Path) -> None:
    """A hole of 400 GB under the name of a photo, which reading would put into memory."""
    shard = tmp_path / "data.tar"
    with tarfile.open(shard, "w") as archive:
        archive.addfile(tarfile.TarInfo("a.png"))
    (tmp_path / "photos").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (16, 16)).save(tmp_path / "photos" / f"{name}.png")
        (tmp_path / "photos" / f"{name}.txt").write_text("a square")
    os.truncate(tmp_path / "photos" / "b.png", 400 * 10**9)
    table = read_table(DataConfig(source=str(tmp_path / "photos")))
    facts = inspect_images([row.image for row in table.rows])
    assert [fact.fault for fact in facts] == ["", "it has 400,000 MB, and at most 250 MB are read"]
    with pytest.raises(OSError, match="400,000 MB"):
        ImageInTar(shard, 512, 400 * 10**9, "data.tar:a.png").read()


def test_an_image_for_which_memory_is_too_short_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    image = ImageFile(tmp_path / "a.png", "a.png")
    monkeypatch.setattr("lapclip.data.check_data.hash_and_thumbnail", no_memory)
    assert "too little memory" in inspect_images([image])[0].fault
    monkeypatch.setattr("lapclip.data.packed_store.prepare", no_memory)
    packed = pack([image], store_folder("x", View(8), MIDDLE), View(8), MIDDLE)
    assert "too little memory" in packed.skipped[0].why
