"""WebDataset shards, read by offset."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from lapclip.data.sources.files import expand
from lapclip.data.table import ImageInTar
from lapclip.errors import DataError
from tests.data.sources.made import found, image_bytes, read, skipped, splits


def shard(path: Path, members: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


LONG = "a-very-long-folder-name/" * 12


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_pairs_are_read_where_they_lie(tmp_path: Path, form: int) -> None:
    far = "d/" * 60 if form == tarfile.USTAR_FORMAT else LONG
    members = {
        "0001.jpg": image_bytes(1), "0001.txt": b"a dog\nthe dog\n", "0001.json": b'{"caption": "a dog"}',
        "0002.json": json.dumps({"text": ["a cat"], "split": "dev"}).encode(), "0002.webp": image_bytes(2),
        f"{far}0003.PNG": image_bytes(3), f"{far}0003.txt": "ein Käfer".encode(),
    }  # fmt: skip
    table = read(shard(tmp_path / "a.tar", members, form))
    assert found(table) == {
        "a.tar:0001.jpg": ("a dog", "the dog"),
        "a.tar:0002.webp": ("a cat",),
        f"a.tar:{far}0003.PNG": ("ein Käfer",),
    }
    assert [row.image.read() for row in table.rows] == [
        image_bytes(1),
        image_bytes(2),
        image_bytes(3),
    ]
    assert splits(table)["a.tar:0002.webp"] == "val"
    assert all(isinstance(row.image, ImageInTar) for row in table.rows)


def test_a_key_can_be_chosen(tmp_path: Path) -> None:
    members = {
        "1.jpg": image_bytes(),
        "1.txt": b"short",
        "1.json": b'{"caption": "long", "alt": "other"}',
    }
    path = shard(tmp_path / "a.tar", members)
    assert found(read(path)) == {"a.tar:1.jpg": ("short",)}
    assert found(read(path, caption_column="alt")) == {"a.tar:1.jpg": ("other",)}


def test_folders_patterns_and_ranges(tmp_path: Path) -> None:
    for number in range(3):
        shard(tmp_path / f"p-{number:05d}.tar", {"x.jpg": image_bytes(number), "x.txt": b"a thing"})
    assert len(read(tmp_path).rows) == 3
    assert len(read(f"{tmp_path}/p-*.tar").rows) == 3
    table = read(f"{tmp_path}/p-{{00001..00003}}.tar")
    assert set(found(table)) == {"p-00001.tar:x.jpg", "p-00002.tar:x.jpg"}
    assert list(skipped(table).values()) == ["there is no such file"]
    assert [path.name for path in expand("a{x,y}-{8..10}.tar")][1:4] == [
        "ax-9.tar",
        "ax-10.tar",
        "ay-8.tar",
    ]
    with pytest.raises(DataError, match="more than"):
        expand("{0..999999999999}.tar")
    with pytest.raises(DataError, match="more than"):
        expand(f"{tmp_path}/{'{1..9}' * 12}*.tar")


def test_shards_in_folders_of_splits(tmp_path: Path) -> None:
    for folder in ("train", "val"):
        shard(tmp_path / folder / "0.tar", {"x.jpg": image_bytes(), "x.txt": b"a thing"})
    assert splits(read(tmp_path)) == {"train/0.tar:x.jpg": "train", "val/0.tar:x.jpg": "val"}
    assert splits(read(f"{tmp_path}/{{train,val}}/0.tar")) == splits(read(tmp_path))


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    pair = {"ok.jpg": image_bytes(), "ok.txt": b"fine"}
    with tarfile.open(shard(path, pair), "a") as file:
        for name, kind in (("link.jpg", tarfile.SYMTYPE), ("hard.jpg", tarfile.LNKTYPE), ("pipe.jpg", tarfile.FIFOTYPE),
                           ("dev.jpg", tarfile.CHRTYPE), ("folder.jpg", tarfile.DIRTYPE)):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            file.addfile(member)
        for name in (
            "../up.jpg",
            "/root.jpg",
            "C:/disk.jpg",
            "alone.jpg",
            "words.txt",
            "ok.jpg",
            "._ok.jpg",
            "LICENSE",
        ):
            member = tarfile.TarInfo(name)
            member.size = 3
            file.addfile(member, io.BytesIO(b"abc"))
    table = read(path)
    assert found(table) == {"a.tar:ok.jpg": ("fine",)}
    assert set(skipped(table)) == {f"a.tar:{name}" for name in (
        "link.jpg", "hard.jpg", "pipe.jpg", "dev.jpg", "../up.jpg", "/root.jpg", "C:/disk.jpg", "alone.jpg", "words",
        "ok.jpg")}  # fmt: skip


def test_a_damaged_shard_gives_what_came_before(tmp_path: Path) -> None:
    endings = {"jpg": image_bytes(), "txt": b"x y"}
    path = shard(
        tmp_path / "a.tar",
        {f"{n}.{ending}": content for n in range(4) for ending, content in endings.items()},
    )
    whole = path.read_bytes()  # a block of 512 bytes for each header and each content
    path.write_bytes(whole[: 9 * 512 + 30])
    assert skipped(read(path)) == {"a.tar:2.jpg": "the file ends before it does"}
    path.write_bytes(whole[: 10 * 512 + 30])
    said = skipped(read(path))
    assert said["a.tar:2.jpg"] == "no caption"
    assert "damaged" in said["a.tar"]
    path.write_bytes(whole[: 4 * 512] + b"\xff" * 512 + whole[5 * 512 :])
    table = read(path)
    assert set(found(table)) == {"a.tar:0.jpg"}
    assert "byte 2,048" in skipped(table)["a.tar"]


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 10240, b"not a tar " * 100])
def test_files_that_are_no_tar_say_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar"):
        read(tmp_path / "a.tar")


def test_names_with_points_are_pairs_and_other_images_of_a_sample_are_named(tmp_path: Path) -> None:
    members = {
        "img.1.png": image_bytes(1), "img.1.txt": b"one", "img.2.png": image_bytes(2), "img.2.txt": b"two",
        "7.jpg": image_bytes(3), "7.mask.png": image_bytes(4), "7.cls": b"3", "7.txt": b"three",
    }  # fmt: skip
    table = read(shard(tmp_path / "a.tar", members))
    assert found(table) == {
        "a.tar:img.1.png": ("one",),
        "a.tar:img.2.png": ("two",),
        "a.tar:7.jpg": ("three",),
    }
    assert skipped(table) == {"a.tar:7.mask.png": "no caption"}


def test_a_pair_whose_json_is_damaged_is_left_out_because_its_split_is_lost(tmp_path: Path) -> None:
    pair = {"jpg": image_bytes(), "txt": b"a dog"}
    jsons = {
        "good": b'{"split": "test"}',
        "cut": b'{"split": "te',
        "list": b"[1]",
        "long": b"[" + b" " * 1_000_001,
    }
    members = {f"{name}.{ending}": content for name in jsons for ending, content in pair.items()}
    members |= {f"{name}.json": content for name, content in jsons.items()}
    table = read(shard(tmp_path / "a.tar", dict(sorted(members.items()))))
    assert splits(table) == {"a.tar:good.jpg": "test", "a.tar:list.jpg": ""}
    assert skipped(table) == {
        "a.tar:cut.jpg": "its JSON is damaged",
        "a.tar:long.jpg": "its JSON is too long",
    }


@pytest.mark.parametrize("more", ["another shard", "zeros"])
def test_what_follows_the_end_of_a_shard_is_not_lost_without_a_word(
    tmp_path: Path, more: str
) -> None:
    path = shard(tmp_path / "a.tar", {"1.jpg": image_bytes(1), "1.txt": b"one"})
    assert not skipped(read(path))
    other = shard(tmp_path / "b.tar", {"2.jpg": image_bytes(2), "2.txt": b"two"})
    with open(path, "ab") as file:
        file.write(other.read_bytes() if more == "another shard" else bytes(1 << 20))
    table = read(path)
    assert set(found(table)) == {"a.tar:1.jpg"}
    assert "damaged: zeros at byte 2,048" in skipped(table)["a.tar"]


def test_a_list_of_shards_may_mix_whole_and_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one/a.tar", "two/b.tar"):
        shard(tmp_path / name, {"x.jpg": image_bytes(), "x.txt": b"a thing"})
    monkeypatch.chdir(tmp_path)
    assert set(found(read(f"{{{tmp_path}/one/a,two/b}}.tar"))) == {
        "one/a.tar:x.jpg",
        "two/b.tar:x.jpg",
    }
    assert set(found(read("{one/a,two/b}.tar"))) == {"one/a.tar:x.jpg", "two/b.tar:x.jpg"}
    monkeypatch.setattr(
        "os.path.commonpath", lambda paths: int("two drives")
    )  # a ValueError, as Windows has it
    with pytest.raises(DataError, match="several drives"):
        read("{one/a,two/b}.tar")


def test_shards_that_are_links_out_of_the_folder_are_named(tmp_path: Path) -> None:
    for name in ("data/a.tar", "elsewhere/b.tar"):
        shard(tmp_path / name, {"x.jpg": image_bytes(), "x.txt": b"a thing"})
    try:
        (tmp_path / "data" / "b.tar").symlink_to(tmp_path / "elsewhere" / "b.tar")
    except OSError:
        pytest.skip("links cannot be made here")
    table = read(tmp_path / "data")
    assert set(found(table)) == {"a.tar:x.jpg"}
    assert "leads out" in skipped(table)["b.tar"]
