"""Tables in text files: separators, columns, headers, encodings and damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from lapclip.data.table import UsedColumns, note_on_numbers, number_captions
from lapclip.errors import DataError
from tests.data.sources.made import found, make_images, read, skipped, splits

CAPTIONS = ["a dog runs over the grass", "two children on a bench", "a red car in the snow"]


def write(folder: Path, text: str, name: str = "captions.csv", encoding: str = "utf-8") -> Path:
    (folder / name).write_bytes(text.encode(encoding))
    return folder


@pytest.mark.parametrize("sign", [",", "\t", ";", "|"])
@pytest.mark.parametrize(
    "header", ["filepath{0}caption", "bild{0}beschreibung", "Image Name{0} Comment", ""]
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_any_separator_any_names_with_or_without_header(
    tmp_path: Path, sign: str, header: str, end: str
) -> None:
    make_images(tmp_path, "images/a.png", "images/b.png", "images/c.png")
    rows = [
        f"images/{name}.png{sign}{caption}" for name, caption in zip("abc", CAPTIONS, strict=True)
    ]
    write(tmp_path, end.join([header.format(sign), *rows] if header else rows))
    table = read(tmp_path)
    assert found(table) == {
        f"images/{name}.png": (caption,) for name, caption in zip("abc", CAPTIONS, strict=True)
    }
    assert table.kind == "captions.csv"
    assert ("no header" in table.how) == (not header)
    assert {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}[sign] in table.how
    if header:
        assert header.split("{0}")[0] in table.how


ROWS = "w,x,y,z\n0,a dog,train,a.png\n1,two cats,train,b.png\n2,a car,train,c.png\n"
BETTER_NAME = "filepath,text,thumbnail\nx1,a brown dog,a.png\nx2,a black cat,b.png\n"
SPELLINGS = """image,caption
images/a.png,one dog
./images/a.png,a dog
images//a.png,one  dog
images\\a.png,the dog
"""
QUOTES = """image,caption
a.png,"a dog, running
in the snow"
b.png,"an open quote
c.png,the end"
d.png,a 5" disk, grey
"""
OTHER_NAMES = "id,text\none,a first thing\ncaf\u00e9.png,a second thing\nTHREE.png,a third thing\n"


@pytest.mark.parametrize(
    ("text", "captions", "how"),
    [
        pytest.param(
            ROWS,
            {"a.png": ("a dog",), "b.png": ("two cats",), "c.png": ("a car",)},
            'column "z" holds 3 file names: images; column "x": captions; column "y": splits',
            id="columns are guessed from contents",
        ),
        pytest.param(
            BETTER_NAME,
            {"a.png": ("a brown dog",), "b.png": ("a black cat",)},
            'column "thumbnail" holds',
            id="a column of files wins over one with a better name",
        ),
        pytest.param(
            "image,caption,remarks\na.png,0,a dog in the snow\nb.png,1,a cat on a mat\n",
            {"a.png": ("a dog in the snow",), "b.png": ("a cat on a mat",)},
            'column "remarks": captions',
            id="a column of sentences wins over one of numbers",
        ),
        pytest.param(
            SPELLINGS,
            {"images/a.png": ("one dog", "a dog", "the dog")},
            "",
            id="spellings of a name are one image",
        ),
        pytest.param(
            "image,caption_1,caption_2\na.png,a dog,the dog\nb.png,a cat,\n",
            {"a.png": ("a dog", "the dog"), "b.png": ("a cat",)},
            "",
            id="numbered caption columns",
        ),
        pytest.param(
            'image,raw\na.png,"[""a dog"", ""the dog""]"\n',
            {"a.png": ("a dog", "the dog")},
            "",
            id="a JSON list of captions",
        ),
        pytest.param(
            "Our photos of 2024\nimage,caption\na.png,a dog\nb.png,a cat\n",
            {"a.png": ("a dog",), "b.png": ("a cat",)},
            "",
            id="a title above the header",
        ),
        pytest.param(
            QUOTES,
            {
                "a.png": ("a dog, running in the snow",),
                "b.png": ("an open quote",),
                "c.png": ('the end"',),
                "d.png": ('a 5" disk, grey',),
            },
            "1 captions have an unquoted comma",
            id="quotes and line ends",
        ),
        pytest.param(
            "image,caption\na.png,a dog,,\nb.png,a cat, and a dog,,\n",
            {"a.png": ("a dog",), "b.png": ("a cat, and a dog",)},
            "",
            id="empty cells at the end of a row",
        ),
        pytest.param(
            '"the\npicture","\x1b[31mwords"\na.png,a dog\n',
            {"a.png": ("a dog",)},
            'column "the\\npicture" holds 1 file names: images; column "\\x1b[31mwords": captions',
            id="odd names of columns",
        ),
        pytest.param(
            "image,caption,image\na.png,a dog,b.png\n",
            {"a.png": ("a dog",)},
            "2 columns are called image, 1 of them are read",
            id="two columns of images",
        ),
        pytest.param(
            OTHER_NAMES,
            {
                "img/one.PNG": ("a first thing",),
                "img/cafe\u0301.png": ("a second thing",),
                "img/three.png": ("a third thing",),
            },
            "",
            id="names without ending, in other case, with other accents",
        ),
    ],
)
def test_what_is_read_of_a_table(
    tmp_path: Path, text: str, captions: dict[str, tuple[str, ...]], how: str
) -> None:
    make_images(tmp_path, "a.png", "b.png", "c.png", "d.png", "images/a.png")
    make_images(tmp_path, "img/one.PNG", "img/cafe\u0301.png", "img/three.png")
    table = read(write(tmp_path, text))
    assert found(table) == captions
    assert how in table.how


def test_what_is_left_out_or_repeated_is_counted(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "b.png", "images/a.png")
    assert read(write(tmp_path, SPELLINGS)).repeated == 1
    empty = "image,caption_1,caption_2\na.png,a dog,the dog\nb.png,a cat,\n"
    assert skipped(read(write(tmp_path, empty))) == {"captions.csv line 3": "the caption is empty"}
    titled = "Our photos\nimage,caption\na.png,a dog\nb.png,a cat\n"
    assert skipped(read(write(tmp_path, titled))) == {"captions.csv line 1": "1 of 2 columns"}


def test_columns_that_were_read_are_recorded(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "b.png", "c.png")
    table = read(write(tmp_path, ROWS))
    assert set(splits(table).values()) == {"train"}
    assert table.columns == {UsedColumns("z", ("x",), "y"): 3}


def test_columns_can_be_chosen(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "b.png")
    write(tmp_path, "old,new,short,long\na.png,b.png,a dog,a brown dog in the snow\n", "list.txt")
    table = read(
        tmp_path / "list.txt", picture_column="new", caption_column="short", separator="comma"
    )
    assert found(table) == {"b.png": ("a dog",)}
    both = read(tmp_path / "list.txt", caption_column="short,long")
    assert found(both) == {"a.png": ("a dog", "a brown dog in the snow")}
    by_place = read(tmp_path / "list.txt", picture_column="column2", caption_column="column3")
    assert found(by_place) == {"b.png": ("a dog",)}
    with pytest.raises(DataError, match="no such column"):
        read(tmp_path / "list.txt", picture_column="newer")


def test_what_is_left_out_is_named_with_its_line(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", "a.png")
    make_images(tmp_path, "secret.png")
    (data / "folder.png").mkdir()
    lines = ["image,caption,split", "a.png,a dog,train", "gone.png,a cat,train", "a.png,,train",
             "../secret.png,x y,train", f"{tmp_path / 'secret.png'},x y,train", "C:\\secret.png,x y,train",
             "https://example.org/a.png,x y,train", "a.png", "folder.png,x y,train", "a.png,another dog,test",
             "a.png,a third dog,extra", ",x y,train"]  # fmt: skip
    table = read(write(data, "\n".join(lines)))
    assert found(table) == {"a.png": ("a dog",)}
    said = [skipped(table)[f"captions.csv line {number}"] for number in range(3, 14)]
    expected = ["no such image", "empty", "out of the data", "out of the data", "out of the data", "address",
                "1 of 3", "not a plain file", "in train already", "none of train, val, test",
                "no image is named"]  # fmt: skip
    assert all(part in why for part, why in zip(expected, said, strict=True)), said


def test_absolute_names_inside_the_folder_are_taken(tmp_path: Path) -> None:
    make_images(tmp_path, "images/a.png")
    table = read(write(tmp_path, f"image,caption\n{tmp_path / 'images' / 'a.png'},a dog\n"))
    assert found(table) == {"images/a.png": ("a dog",)}


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", "a.png")
    make_images(tmp_path / "other", "b.png")
    try:
        (data / "b.png").symlink_to(tmp_path / "other" / "b.png")
        (data / "linked").symlink_to(tmp_path / "other", target_is_directory=True)
        (data / "c.png").symlink_to(data / "a.png")
    except OSError:
        pytest.skip("links cannot be made here")
    table = read(
        write(
            data, "image,caption\na.png,a dog\nb.png,a cat\nlinked/b.png,a cat\nc.png,a dog again\n"
        )
    )
    assert set(found(table)) == {"a.png", "c.png"}
    assert all("a link that leads out" in why for why in skipped(table).values())
    assert len(skipped(table)) == 3  # two rows, and the folder itself


def test_a_folder_whose_name_begins_alike_is_outside(tmp_path: Path) -> None:
    data, secret = (
        make_images(tmp_path / "data", "a.png"),
        make_images(tmp_path / "data-secret", "b.png"),
    )
    absolute = f"{secret / 'b.png'},by its whole name\n../data-secret/b.png,upwards\n"
    try:
        (data / "b.png").symlink_to(secret / "b.png")
        (data / "linked").symlink_to(secret, target_is_directory=True)
    except OSError:
        pytest.skip("links cannot be made here")
    table = read(
        write(data, f"image,caption\na.png,a dog\nb.png,a link\nlinked/b.png,in a link\n{absolute}")
    )
    assert found(table) == {"a.png": ("a dog",)}
    assert {row.image.read() for row in table.rows} == {(data / "a.png").read_bytes()}
    (data / "captions.csv").unlink()
    for name in ("a", "b"):
        (data / f"{name}.txt").write_text("a dog")
    assert set(found(read(data))) == {"a.png"}


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"]
)
def test_encodings_and_byte_order_marks(tmp_path: Path, encoding: str) -> None:
    make_images(tmp_path, "a.png")
    table = read(write(tmp_path, "image,caption\r\na.png,a café in Köln\r\n", encoding=encoding))
    assert found(table) == {"a.png": ("a café in Köln",)}
    said = {
        "utf-16": "UTF-16",
        "utf-16-le": "UTF-16-LE",
        "utf-16-be": "UTF-16-BE",
        "utf-32": "UTF-32",
        "cp1252": "Windows-1252",
    }.get(encoding, "")
    assert said in table.how


def test_nul_characters_and_huge_fields(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "b.png", "c.png")
    huge = "word " * 300_000
    table = read(
        write(
            tmp_path,
            f'image,caption\na.png,a\0 dog\nb.png,{huge}\nc.png,"{huge[:200_000]}"\na\0.png,a cat\n',
        )
    )
    assert found(table) == {"a.png": ("a dog",)}
    said = skipped(table)
    assert "too long" in said["captions.csv line 3"]
    assert "characters" in said["captions.csv line 4"]
    assert "NUL" in said["captions.csv line 5"]


def test_the_folder_of_the_images_can_be_named(tmp_path: Path) -> None:
    make_images(tmp_path / "elsewhere", "a.png")
    (tmp_path / "tables").mkdir()
    write(tmp_path / "tables", "image,caption\na.png,a dog\n")
    with pytest.raises(DataError, match=r"None of the 1 rows .* there is no such image"):
        read(tmp_path / "tables")
    table = read(tmp_path / "tables", pictures=str(tmp_path / "elsewhere"))
    assert found(table) == {"a.png": ("a dog",)}


def test_flickr8k_as_its_authors_give_it(tmp_path: Path) -> None:
    make_images(tmp_path / "Flicker8k_Dataset", "a.jpg", "b.jpg")
    write(
        tmp_path,
        "a.jpg#0\tA dog , running .\na.jpg#1\tThe dog .\nb.jpg#0\tA cat .\n",
        "Flickr8k.token.txt",
    )
    assert found(read(tmp_path))["Flicker8k_Dataset/a.jpg"] == ("A dog , running .", "The dog .")
    assert set(splits(read(tmp_path)).values()) == {""}
    write(tmp_path, "a.jpg\n", "Flickr_8k.trainImages.txt")
    write(tmp_path, "b.jpg\n", "Flickr_8k.devImages.txt")
    assert list(splits(read(tmp_path)).values()) == ["train", "val"]


def test_flickr_as_kaggle_gives_it(tmp_path: Path) -> None:
    make_images(tmp_path / "Images", "a.jpg", "b.jpg")
    write(
        tmp_path,
        'image,caption\na.jpg,"A dog , running ."\na.jpg,The dog .\nb.jpg,A cat .\n',
        "captions.txt",
    )
    assert found(read(tmp_path))["Images/a.jpg"] == ("A dog , running .", "The dog .")
    other = make_images(
        tmp_path / "thirty" / "flickr30k_images" / "flickr30k_images", "a.jpg"
    ).parent.parent
    write(
        other, "image_name| comment_number| comment\na.jpg| 0| A dog , running .\n", "results.csv"
    )
    assert list(found(read(other)).values()) == [("A dog , running .",)]


def test_a_table_a_split(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "b.png", "c.png")
    for name, split in (("a", "train"), ("b", "valid"), ("c", "test")):
        write(tmp_path, f"image,caption\n{name}.png,a thing\n", f"{split}.csv")
    assert splits(read(tmp_path)) == {"a.png": "train", "b.png": "val", "c.png": "test"}
    assert set(splits(read(tmp_path, split_column="")).values()) == {""}
    write(tmp_path, "image,caption\na.png,a thing\n", "more.csv")
    with pytest.raises(DataError, match="several tables"):
        read(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "just one column\nand another\n", "image,caption\n", "1,2\n3,4\n"]
)
def test_tables_without_pairs_say_so(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError) as caught:
        read(write(tmp_path, text) / "captions.csv")
    assert "captions.csv" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_first_row_whose_image_is_missing_is_no_header(tmp_path: Path) -> None:
    make_images(tmp_path, "0002.png", "0003.png")
    rows = "0001,a dog in the snow\n0002,a cat on a wall\n0003,a bird in a tree\n"
    table = read(write(tmp_path, rows))
    assert set(found(table)) == {"0002.png", "0003.png"}
    assert skipped(table) == {"captions.csv line 1": "there is no such image"}
    assert "no header" in table.how
    for header in ("bild,satz", "name,satz", "0000,caption 1"):
        table = read(write(tmp_path, f"{header}\n{rows}"))
        assert set(skipped(table)) == {"captions.csv line 2"}, header


def test_the_folder_of_the_images_may_be_below_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_images(tmp_path / "home" / "photos", "a.png")
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    (tmp_path / "tables").mkdir()
    table = read(write(tmp_path / "tables", "image,caption\na.png,a dog\n"), pictures="~/photos")
    assert found(table) == {"a.png": ("a dog",)}


@pytest.mark.parametrize("setting", ["auto", "caption"])
def test_no_column_is_lost_because_another_one_has_its_name(tmp_path: Path, setting: str) -> None:
    make_images(tmp_path, "a.png", "b.png")
    rows = (
        "image,caption,split,caption\na.png,a dog,train,a brown dog\nb.png,a cat,val,a grey cat\n"
    )
    table = read(write(tmp_path, rows), caption_column=setting)
    assert found(table) == {"a.png": ("a dog", "a brown dog"), "b.png": ("a cat", "a grey cat")}
    assert "2 columns are called caption, 2 of them are read" in table.how


def test_captions_that_are_numbers_are_read_and_said(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "b.png")
    table = read(write(tmp_path, "image,caption\na.png,0\na.png,0\nb.png,12\nb.png,a dog\n"))
    assert found(table) == {"a.png": ("0",), "b.png": ("12", "a dog")}
    assert "2 of 3 captions are numbers, such as '0'" in note_on_numbers(table.rows)
    assert number_captions(table.rows) == ["0", "12"]
