"""`lapclip embed`: what the files hold, and that nothing is lost or mixed up on the way there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
from pyarrow import parquet

import lapclip as package
from lapclip.commands import embed as room
from lapclip.commands.embed import EmbedOptions
from lapclip.config import DataConfig
from lapclip.data import vector_files
from lapclip.data.loading import load_data
from lapclip.embedder import Embedder
from lapclip.errors import ConfigError, DataError, LapclipError, RunBusy
from lapclip.progress import ignore_progress
from lapclip.training.teacher import TeacherFile

from ..conftest import command, lapclip
from ..searching.made import another_model, draw, draw_many
from ..small_runs import write_classes, write_photos


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved after each batch of four, and written in pieces of three."""
    monkeypatch.setattr(room, "SAVED_EVERY", -1.0)
    monkeypatch.setattr(room, "CPU_BATCH", 4)
    monkeypatch.setattr(vector_files, "BLOCK_IMAGES", 3)


def embedded(data: Path | str, out: Path, model: Path | None, **options: Any) -> dict[str, Any]:
    return room.embed(EmbedOptions(str(data), out, str(model) if model else None, "cpu", **options))


def read(path: Path) -> dict[str, Any]:
    """What a file holds, whichever form it has: by image, and by caption."""
    if path.suffix == ".parquet":
        table = parquet.read_table(path)
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
        texts = [vector for vectors in columns.get("caption_vectors", []) for vector in vectors]
        told = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        return {
            "paths": columns["path"],
            "captions": columns["captions"],
            "split": columns["split"],
            "image": np.array(columns["vector"], np.float32),
            "text": np.array(texts, np.float32),
            "fingerprint": told["fingerprint"],
            "about": json.loads(told["lapclip"]),
        }
    about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    captions = path.with_stem(f"{path.stem}-captions")
    columns = {name: [row[name] for row in about["rows"]] for name in ("path", "captions", "split")}
    return {
        "paths": columns["path"],
        "captions": columns["captions"],
        "split": columns["split"],
        "image": np.load(path),
        "text": np.load(captions) if captions.exists() else np.zeros((0, 0)),
        "fingerprint": about["fingerprint"],
        "about": about["lapclip"],
    }


@pytest.mark.parametrize("ending", [".parquet", ".npy"])
def test_a_file_holds_what_the_model_says_of_each_image_and_caption(
    trained: Path, here: Path, ending: str
) -> None:
    data = write_photos(here / "photos", ["train"] * 7 + ["val"] * 3)
    (data / "4.png").write_bytes(b"no image")
    done = embedded(data, here / f"out{ending}", trained)
    found, model = read(here / f"out{ending}"), package.load(trained)
    paths = [f"{at}.png" for at in range(10) if at != 4]
    assert found["paths"] == paths
    assert found["split"] == ["train"] * 6 + ["val"] * 3
    assert found["captions"] == [
        [f"{words} number {path[0]}" for words in ("a thing", "the thing")] for path in paths
    ]
    assert found["image"].dtype == np.float32
    np.testing.assert_allclose(
        found["image"], model.encode_image([data / path for path in paths]), atol=1e-5
    )
    captions = [caption for one in found["captions"] for caption in one]
    np.testing.assert_allclose(found["text"], model.encode_text(captions), atol=1e-5)
    assert found["fingerprint"] == done["fingerprint"] == model.fingerprint()
    assert Path(found["about"]["folder"]) == data
    assert done["unreadable"] == [{"path": "4.png", "reason": "it is not an image of a known form"}]
    assert (done["rows"], done["dimension"], done["captions"]) == (9, model.embedding, 18)
    files = ["out.parquet"] if ending == ".parquet" else ["out-captions.npy", "out.json", "out.npy"]
    assert sorted(path.name for path in here.iterdir()) == [*files, "photos"]


@pytest.mark.parametrize("ending", [".parquet", ".npy"])
def test_a_file_teaches(trained: Path, here: Path, ending: str) -> None:
    data = write_photos(here / "photos", ["train"] * 10 + ["val"] * 2)
    embedded(data, here / f"out{ending}", trained)
    pairs = load_data(DataConfig(source=str(data)), 64).train
    config = DataConfig(source=str(data))
    vectors = TeacherFile(here / f"out{ending}").embed(config, pairs, ignore_progress)
    model = package.load(trained)
    np.testing.assert_allclose(
        vectors.images, model.encode_image([data / name for name in pairs.names]), atol=1e-5
    )
    captions = [caption for options in pairs.captions for caption in options]
    np.testing.assert_allclose(vectors.captions, model.encode_text(captions), atol=1e-5)


def test_a_file_that_is_up_to_date_says_what_it_lacks(trained: Path, here: Path) -> None:
    data = write_photos(here / "photos", ["train"] * 4)
    (data / "2.png").write_bytes(b"no image")
    embedded(data, here / "out.npy", trained)
    again = embedded(data, here / "out.npy", trained)
    assert again["embedded"] == 0
    assert "1 image could not be read when it was written" in again["notes"]


def test_a_half_replaced_file_does_not_teach(trained: Path, here: Path) -> None:
    """A kill between the files of one writing leaves vectors of two models."""
    data = write_photos(here / "photos", ["train"] * 4)
    embedded(data, here / "out.npy", trained)
    vectors = np.load(here / "out.npy")
    np.save(here / "out.npy", vectors[::-1])
    with pytest.raises(DataError, match="not from one writing"):
        TeacherFile(here / "out.npy")


def test_vectors_of_captions_do_not_outlive_the_captions(trained: Path, here: Path) -> None:
    data = write_photos(here / "photos", ["train"] * 4)
    embedded(data, here / "out.npy", trained)
    assert (here / "out-captions.npy").exists()
    (data / "captions.csv").unlink()
    assert embedded(data, here / "out.npy", trained)["captions"] == 0
    assert not (here / "out-captions.npy").exists()
    assert embedded(data, here / "out.npy", trained)["embedded"] == 0
    np.save(here / "out-captions.npy", np.eye(3))  # the user's own
    with pytest.raises(ConfigError, match="left alone"):
        embedded(data, here / "out.npy", trained)


def test_a_folder_without_captions_and_folders_that_look_like_classes(
    trained: Path, here: Path
) -> None:
    data = write_classes(here / "clothes", 2)
    draw(data / "loose.png", 1)
    (data / "prices.csv").write_text("a,b\n1,2\n")  # a table, and none of images
    embedded(data, here / "plain.npy", trained)
    found = read(here / "plain.npy")
    assert sorted(found["paths"]) == [
        "loose.png",
        "owl/0.png",
        "owl/1.png",
        "red_cat/0.png",
        "red_cat/1.png",
    ]
    assert not any(found["captions"])
    (data / "prices.csv").unlink()
    done = embedded(data, here / "plain.npy", trained)
    assert (done["rows"], done["captions"], done["embedded"]) == (5, 0, 0)
    done = embedded(
        data, here / "prompted.npy", trained, settings=["data.prompts=a photo of a {}."]
    )
    assert (done["rows"], done["captions"]) == (4, 4)
    assert read(here / "prompted.npy")["captions"][-1] == ["a photo of a red cat."]
    (here / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        embedded(here / "empty", here / "none.npy", trained)


def test_only_a_split(trained: Path, here: Path) -> None:
    data = write_photos(here / "photos", ["train"] * 3 + ["test"] * 2)
    embedded(data, here / "out.parquet", trained, split="test")
    assert read(here / "out.parquet")["paths"] == ["3.png", "4.png"]
    with pytest.raises(DataError, match="train, test"):
        embedded(data, here / "out.parquet", trained, split="dev")
    done = embedded(
        "scenes", here / "drawn.npy", trained, split="val", settings=["data.train_pairs=64"]
    )
    assert done["rows"] == len(set(read(here / "drawn.npy")["paths"])) > 100


def test_interrupted_at_any_batch_it_goes_on_to_the_same_file(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_photos(here / "photos", ["train"] * 18)
    (data / "1.png").write_bytes(b"no image")
    embedded(data, here / "whole.parquet", trained)
    real, calls = Embedder.embed_pixels, [0]

    def stops(self: Embedder, pixels: np.ndarray) -> np.ndarray:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return real(self, pixels)

    monkeypatch.setattr(Embedder, "embed_pixels", stops)
    rows: list[str] = []
    for _ in range(3):
        calls[0] = 0
        with pytest.raises(KeyboardInterrupt) as stopped:
            embedded(data, here / "out.parquet", trained)
        rows += [word for word in str(stopped.value).split() if word.isdigit()][:1]
        assert not (here / "out.parquet").exists()
        # What a process leaves that was killed between vectors and their line, and in the middle of a line.
        for name, tail in (
            ("image.f32", b"xyz" * 99),
            ("text.f32", b"xyz" * 77),
            ("journal.jsonl", b'{"rows": 9'),
        ):
            with open(here / "out.parquet.unfinished" / name, "ab") as file:
                file.write(tail)
    assert rows == ["4", "8", "12"]
    monkeypatch.setattr(Embedder, "embed_pixels", real)
    done = embedded(data, here / "out.parquet", trained)
    assert done["embedded"] == 6
    assert [one["path"] for one in done["unreadable"]] == ["1.png"]
    got, want = read(here / "out.parquet"), read(here / "whole.parquet")
    assert got["paths"] == want["paths"]
    for name in ("image", "text"):
        np.testing.assert_allclose(got[name], want[name], atol=1e-6)
    assert not (here / "out.parquet.unfinished").exists()


def stopped_after(batches: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ctrl-C after so many batches; gives what ends that."""
    real, calls = Embedder.embed_pixels, [0]

    def stops(self: Embedder, pixels: np.ndarray) -> np.ndarray:
        calls[0] += 1
        if calls[0] > batches:
            raise KeyboardInterrupt
        return real(self, pixels)

    monkeypatch.setattr(Embedder, "embed_pixels", stops)
    return lambda: monkeypatch.setattr(Embedder, "embed_pixels", real)


@pytest.mark.parametrize("change", ["model", "image", "caption", "nothing"])
def test_what_was_begun_with_another_model_or_other_data_is_begun_anew(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    data, model = write_photos(here / "photos", ["train"] * 10), trained
    let_go = stopped_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="8 of 10"):
        embedded(data, here / "out.npy", model)
    let_go()
    if change == "model":
        model = another_model(trained, here / "other")
    elif change == "image":
        draw(data / "3.png", 99)
    elif change == "caption":
        table = data / "captions.csv"
        table.write_text(
            table.read_text(encoding="utf-8").replace("a thing number 3", "three"), encoding="utf-8"
        )
    done = embedded(data, here / "out.npy", model)
    assert done["embedded"] == (2 if change == "nothing" else 10)
    said = " ".join(done["notes"])
    assert ("anew" in said) == (change != "nothing")
    assert ("model has changed" in said) == (change == "model")
    found = read(here / "out.npy")
    np.testing.assert_allclose(
        found["image"],
        package.load(model).encode_image([data / path for path in found["paths"]]),
        atol=1e-5,
    )


def test_a_finished_file_is_made_again_only_where_something_has_changed(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = here / "photos", here / "out.parquet"
    draw_many(data, 5)
    assert embedded(data, out, trained)["embedded"] == 5
    before = out.read_bytes()
    assert embedded(data, out, None)["embedded"] == 0  # without a name, the model that made it
    assert out.read_bytes() == before
    draw(data / "new.png", 77)
    let_go = stopped_after(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        embedded(data, out, None)
    assert out.read_bytes() == before
    let_go()
    done = embedded(data, out, None)
    assert (done["rows"], done["embedded"]) == (6, 6)
    (data / "new.png").write_bytes(b"")
    assert embedded(data, out, None)["rows"] == 5
    assert embedded(data, out, None)["embedded"] == 0  # the same bytes are no image either
    draw(data / "new.png", 78)
    assert embedded(data, out, None)["embedded"] == 6


def test_what_could_not_be_read_this_time_is_tried_again(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = here / "photos", here / "out.npy"
    draw_many(data, 5)
    real = room.read_stored

    def too_little_memory(image: Any, view: Any) -> Any:
        read = real(image, view)
        return (
            read
            if image.name != "001.png"
            else read._replace(square=None, passing="there was too little memory")
        )

    monkeypatch.setattr(room, "read_stored", too_little_memory)
    assert embedded(data, out, trained)["rows"] == 4
    monkeypatch.setattr(room, "read_stored", real)
    assert embedded(data, out, trained)["rows"] == 5
    assert embedded(data, out, trained)["embedded"] == 0


def test_vectors_and_names_of_two_writings_are_noticed(trained: Path, here: Path) -> None:
    data, out = here / "photos", here / "out.npy"
    draw_many(data, 3)
    embedded(data, out, trained)
    assert embedded(data, out, trained)["embedded"] == 0
    before = np.load(out)
    np.save(out, before[::-1])  # the user's own
    with pytest.raises(ConfigError, match="left alone"):
        embedded(data, out, trained)
    (here / "out.npy.unfinished").mkdir()  # as after a crash between the two
    assert embedded(data, out, trained)["embedded"] == 3
    np.testing.assert_array_equal(np.load(out), before)
    told = out.with_suffix(".json")
    digests = json.loads(told.read_text(encoding="utf-8"))["lapclip"]["sha256"]
    assert digests == {"out.npy": hashlib.sha256(out.read_bytes()).hexdigest()}


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no file that is open")
def test_the_lock_is_held_until_its_folder_is_gone(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []
    real = filelock.FileLock.release

    def release(self: Any, *options: Any, **more: Any) -> None:
        there.append((here / "out.npy.unfinished").exists())
        real(self, *options, **more)

    monkeypatch.setattr(filelock.FileLock, "release", release)
    with room.UnfinishedVectors(here / "out.npy").locked():
        pass
    assert there[:1] == [False]


@pytest.mark.parametrize("name", ["out.parquet", "out.npy", "out-captions.npy", "beside.json"])
def test_files_of_others_are_left_alone(trained: Path, here: Path, name: str) -> None:
    draw_many(here / "photos", 1)
    (here / name).write_bytes(b"mine")
    out = here / name.replace("-captions", "").replace("beside.json", "beside.npy")
    with pytest.raises(ConfigError, match="left alone"):
        embedded(here / "photos", out, trained)
    assert (here / name).read_bytes() == b"mine"
    assert not list(here.glob("*.unfinished"))


def test_mistakes_are_told_before_any_work(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_many(here / "photos", 1)

    def said(*arguments: str) -> str:
        done = lapclip("embed", "photos", "--model", str(trained), *arguments)
        assert done.returncode == 2
        assert not list(here.glob("*.unfinished"))
        return done.stderr

    assert ".parquet or .npy" in said("--out", "vectors.bin")
    assert "--out out.npy" in said("--out", "photos/out.npy")
    assert "--device auto" in said("--out", "out.npy", "--device", "cuda:7")
    monkeypatch.setattr(vector_files, "find_spec", lambda name: None)
    assert "[parquet]" in said("--out", "out.parquet")


def test_two_at_once_do_not_mix(trained: Path, here: Path) -> None:
    draw_many(here / "photos", 1)
    with room.UnfinishedVectors(here / "out.npy").locked(), pytest.raises(RunBusy):
        embedded(here / "photos", here / "out.npy", trained)


def test_images_none_of_which_can_be_read(trained: Path, here: Path) -> None:
    (here / "photos").mkdir()
    (here / "photos" / "a.jpg").write_bytes(b"no image")
    with pytest.raises(LapclipError, match="1 because it is not an image"):
        embedded(here / "photos", here / "out.npy", trained)
    assert [path.name for path in here.iterdir()] == ["photos"]


def test_the_command_and_its_json(trained: Path, here: Path) -> None:
    shutil.copytree(trained, here / "runs" / "mine")
    draw_many(here / "photos", 3)
    done = lapclip("embed", "photos", "--out", "out.parquet", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {
        "file", "rows", "captions", "dimension", "fingerprint", "seconds", "embedded", "bytes", "model", "why_model",
        "data", "unreadable", "notes",
    }  # fmt: skip
    assert (found["file"], found["rows"], found["model"]) == (
        "out.parquet",
        3,
        str(Path("runs") / "mine"),
    )
    assert found["bytes"] == (here / "out.parquet").stat().st_size
    told = lapclip("embed", "photos", "--out", "out.parquet")
    assert "3 images" in told.stdout
    assert found["fingerprint"] in told.stdout
    assert "read_parquet" in told.stdout.splitlines()[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="such names are Linux's")
def test_names_that_are_no_text(trained: Path, here: Path) -> None:
    made = draw(here / "photos" / "a.png", 1)
    try:
        os.rename(made, os.fsencode(here / "photos") + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system takes only Unicode")
    for ending in (".parquet", ".npy"):
        assert embedded(here / "photos", here / f"out{ending}", trained)["rows"] == 1
    assert read(here / "out.parquet")["paths"] == ["caf\\udce9.png"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_killed_processes_lose_no_more_than_was_not_saved(trained: Path, here: Path) -> None:
    draw_many(here / "photos", 3000)
    arguments = ["embed", "photos", "--model", str(trained), "--out", "out.npy", "--device", "cpu"]
    journal, kills = here / "out.npy.unfinished" / "journal.jsonl", 0
    for _ in range(3):
        process = subprocess.Popen(
            command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        lines = len(journal.read_text().splitlines()) if journal.exists() else 1
        while process.poll() is None and not (
            journal.exists() and len(journal.read_text().splitlines()) > lines
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    done = json.loads(lapclip(*arguments, "--json").stdout)
    assert kills
    assert done["rows"] == 3000
    assert done["embedded"] < 3000


def test_a_folder_that_was_moved_is_named_where_it_is(trained: Path, tmp_path: Path) -> None:
    draw_many(tmp_path / "before", 5)
    embedded(tmp_path / "before", tmp_path / "vectors.npy", trained)
    (tmp_path / "before").rename(tmp_path / "after")
    embedded(tmp_path / "after", tmp_path / "vectors.npy", trained)
    about = read(tmp_path / "vectors.npy")["about"]
    assert (about["folder"], about["source"]) == (str(tmp_path / "after"), str(tmp_path / "after"))
