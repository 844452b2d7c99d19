"""What the registry promises: a source is one file, and callers ask it instead of comparing names."""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import lapclip
from lapclip.config import DataConfig
from lapclip.data import sources
from lapclip.data.loading import list_data, load_data
from lapclip.data.sources import absolute, find_source, read_table
from lapclip.data.sources.registry import (
    BUILT_IN,
    FORMATS,
    FileFormat,
    Files,
    Form,
    Source,
    Specificity,
    forms_in,
    register,
)
from lapclip.data.table import ImageFile, RowCollector, Table

from .made import image_bytes, make_images


@pytest.fixture
def registry() -> Iterator[None]:
    """The registry as it was, after a test has added to it."""
    built_in, formats = dict(BUILT_IN), list(FORMATS)
    yield
    BUILT_IN.clear()
    BUILT_IN.update(built_in)
    FORMATS[:] = formats


@pytest.mark.usefixtures("registry")
def test_a_format_of_files_needs_its_own_class_and_nothing_else(tmp_path: Path) -> None:
    @register
    class Pipes(FileFormat):
        label = "lists"
        endings = (".list",)
        by_pattern = True

        def recognise(self, names: Sequence[str]) -> Iterable[Form]:
            yield Form(
                Specificity.SHARDS,
                [name for name in names if name.endswith(self.endings)],
                format=self,
            )

        def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
            for path, split in files.paths():
                for line in path.read_text().splitlines():
                    name, caption = line.split(" = ")
                    collector.add(ImageFile(files.root / name, name), caption, split, line)
            return "lists of names"

    make_images(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "train.list").write_text("a.png = one\nb.png = two")
    (tmp_path / "val.list").write_text("c.png = three")
    whole = read_table(DataConfig(source=str(tmp_path)))
    assert [(row.image.name, row.captions, row.split) for row in whole.rows] == [
        ("a.png", ("one",), "train"),
        ("b.png", ("two",), "train"),
        ("c.png", ("three",), "val"),
    ]
    assert (whole.kind, whole.how) == ("lists", "2 lists: lists of names")
    assert len(read_table(DataConfig(source=str(tmp_path / "train.list"))).rows) == 2
    assert len(read_table(DataConfig(source=str(tmp_path / "*.list"))).rows) == 3
    assert len(load_data(DataConfig(source=str(tmp_path), min_pairs=2), 8).train) == 2


@pytest.mark.usefixtures("registry")
def test_a_format_that_no_pattern_names_reads_the_same_from_its_folder_and_by_its_file(
    tmp_path: Path,
) -> None:
    @register
    class Notes(FileFormat):
        label = "notes"
        endings = (".notes",)

        def recognise(self, names: Sequence[str]) -> Iterable[Form]:
            yield Form(
                Specificity.TEXT_FILES,
                [name for name in names if name.endswith(self.endings)],
                format=self,
            )

        def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
            for path, split in files.paths():
                for name in path.read_text().split():
                    collector.add(
                        ImageFile(path.parent / name, name), f"this is {name}", split, name
                    )
            return "names of images"

    make_images(tmp_path, "a.png", "b.png")
    (tmp_path / "album.notes").write_text("a.png b.png")
    assert [row.image.name for row in read_table(DataConfig(source=str(tmp_path))).rows] == [
        "a.png",
        "b.png",
    ]
    assert [
        row.split for row in read_table(DataConfig(source=str(tmp_path / "album.notes"))).rows
    ] == ["", ""]


@pytest.mark.usefixtures("registry")
def test_a_built_in_source_needs_its_own_class_and_nothing_else(tmp_path: Path) -> None:
    @register
    class Squares(Source):
        name = "squares"

        def read_table(self, config: DataConfig) -> Table:
            collector = RowCollector()
            for shade in range(10):
                path = tmp_path / f"{shade}.png"
                path.write_bytes(image_bytes(shade))
                collector.add(
                    ImageFile(path, path.name),
                    f"shade {shade}",
                    "val" if shade > 7 else "train",
                    path.name,
                )
            return collector.table(self.name, "squares")

    config = DataConfig(source="squares", min_pairs=2)
    assert absolute("squares") == "squares"
    assert find_source("squares").count_images(config) == 8
    assert {split: len(pairs) for split, pairs in load_data(config, 8).splits.items()} == {
        "train": 8,
        "val": 2,
    }


def test_what_comes_with_lapclip_is_known_by_name_and_all_else_is_files(tmp_path: Path) -> None:
    assert {name: source.is_drawn for name, source in BUILT_IN.items()} == {
        "scenes": True,
        "emoji": False,
    }
    assert not find_source(str(tmp_path)).name
    assert absolute("photos") == os.path.abspath("photos")


def test_every_file_of_the_folder_registers_what_it_holds() -> None:
    """But for the registry, and for the source that asks the formats."""
    homes = {type(each).__module__.rpartition(".")[2] for each in (*BUILT_IN.values(), *FORMATS)}
    assert homes == {found.name for found in pkgutil.iter_modules(sources.__path__)} - {
        "registry",
        "files",
    }


def test_a_name_says_one_format() -> None:
    endings = [ending for each in FORMATS for ending in each.endings]
    assert len(endings) == len(set(endings))
    assert sum(each.reads_any_text for each in FORMATS) == 1


def test_tables_of_several_formats_are_one_form() -> None:
    names = [
        "a/metadata.csv",
        "b/metadata.jsonl",
        "captions.csv",
        "captions.jsonl",
        "other.tsv",
        "x.json",
        "y.tar",
    ]
    assert [(form.specificity, list(form.files), form.sure) for form in forms_in(names)] == [
        (Specificity.METADATA, names[:2], True),
        (Specificity.CAPTIONS, names[2:4], True),
        (Specificity.TABLE, names[4:5], False),
        (Specificity.JSON, names[5:6], False),
        (Specificity.SHARDS, names[6:], True),
    ]


def test_drawn_data_is_listed_and_loaded_like_files() -> None:
    config = DataConfig(train_pairs=10)
    listing, data = list_data(config, 32), load_data(config, 32)
    assert listing.drawn is not None
    assert len(listing.table.rows) == len(listing.splits) == 10 + 240 + 240
    chosen = [at for at, split in enumerate(listing.splits) if split == "test"]
    pairs, notes = listing.load(chosen, 32)
    assert (pairs.pixels[:] == data.splits["test"].pixels[:]).all()
    assert pairs.captions == data.splits["test"].captions
    assert notes == []
    some, _ = listing.load([3, 9, 12, 300], 32)
    assert [tuple(captions) for captions in some.captions] == [
        listing.table.rows[at].captions for at in (3, 9, 12, 300)
    ]
    assert (some.pixels[1] == data.train.pixels[9]).all()
    assert (some.pixels[2:][1] == data.splits["test"].pixels[50]).all()


def test_no_module_outside_data_compares_the_name_of_a_source() -> None:
    """Callers ask the source; a name in an `if` would have to be found again for the next one."""
    package = Path(lapclip.__file__).parent
    compared = re.compile(
        r"""[=!]=\s*(SCENES|["'](scenes|emoji)["'])|\bin \([^)]*["'](scenes|emoji)["']"""
    )
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] != "data"
        for line in path.read_text(encoding="utf-8").splitlines()
        if compared.search(line)
    ]
    assert found == []


def test_images_are_counted_as_they_are_before_any_is_held_out(tmp_path: Path) -> None:
    """How many will be held out depends on their content, which nobody has read yet."""
    make_images(tmp_path, *(f"{at}.png" for at in range(40)))
    table = tmp_path / "captions.csv"
    table.write_text("filepath,caption\n" + "".join(f"{at}.png,image {at}\n" for at in range(40)))
    assert find_source(str(table)).count_images(DataConfig(source=str(table))) == 40
    splits = ["train"] * 30 + ["val"] * 6 + ["test"] * 4
    lines = [f"{at}.png,image {at},{split}\n" for at, split in enumerate(splits)]
    table.write_text("filepath,caption,split\n" + "".join(lines))
    assert find_source(str(table)).count_images(DataConfig(source=str(table))) == 30
