"""Published models by their short names, from a hub of our own: honest, slow, broken, lying."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download
from PIL import Image

import lapclip
from lapclip.errors import WeightsError
from lapclip.model.clip import count_parameters
from lapclip.model.shapes import SHAPES
from lapclip.model.sizes import count_weights
from lapclip.weights import published_models
from lapclip.weights.published import KNOWN, Sizes
from lapclip.weights.published_models import MODELS, best_that_fits, fetch
from lapclip.which_model import which_model

from ..conftest import lapclip as run
from ..conftest import set_flags
from .made import SHAPE, embedder, save_openclip
from .stand_in import WEIGHTS, Server, served


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A small model as it lies on the hub, and its parameters."""
    folder = tmp_path_factory.mktemp("made")
    model = embedder(replace(SHAPE, context=77))
    there = save_openclip(model, folder / "on-the-hub")
    (there / "large.msgpack").write_bytes(b"not wanted")
    return there, count_parameters(model.model)


@pytest.fixture
def server(
    made: tuple[Path, int],
    tmp_path: Path,
    here: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Server]:
    """Two models by name, a cache of their own, no waiting between tries."""
    folder = tmp_path / "on-the-hub"
    shutil.copytree(made[0], folder)
    with served(Server(folder, made[1])) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.address)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("LAPCLIP_DATA", str(tmp_path / "data"))
        monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
        monkeypatch.setattr(published_models, "MODELS", found.models())
        yield found


MILLIONS = {"vit-b-16-siglip": 203.16, "vit-b-16-siglip-256": 203.2, "vit-b-16-siglip-384": 203.45,
            "vit-l-16-siglip-256": 652.15, "vit-l-16-siglip-384": 652.48, "so400m-14-siglip-384": 877.96}  # fmt: skip
"""Parameters in OpenCLIP's docs/model_profile.csv."""


def test_every_model_of_the_table_is_whole_and_its_parameters_are_those_of_its_shape() -> None:
    known = {name.lower(): counted(sizes) for name, sizes in KNOWN.items()}
    known["vit-b-32-256"] = counted(KNOWN["ViT-B-32"]._replace(image_size=256))
    assert len(MODELS) >= 6
    for name, model in MODELS.items():
        if "siglip" not in name:
            assert model.parameters == known[name.rpartition("-")[0]], name
        elif name in MILLIONS:
            assert round(model.parameters / 1e6, 2) == MILLIONS[name], name
        if name != "vit-b-16-siglip2-384":  # its publishers give no such figures
            assert len(model.flickr30k) == len(model.coco) == 6, name
            assert set(model.to_dict()["recall"]) == {"flickr30k", "coco", "source"}
        assert model.license in ("MIT", "Apache-2.0"), name
        assert model.page.startswith("https://"), name
        assert {"name", "parameters", "bytes", "license", "cached", "recall", "from"} <= set(
            model.to_dict()
        )


def counted(sizes: Sizes) -> int:
    """Return the parameters of a CLIP of these sizes."""
    values = sizes._asdict()
    mlps = {f"{tower}_mlp": values.pop(f"{tower}_hidden") for tower in ("image", "text")}
    return count_weights(replace(SHAPES["vit-b-32"], **values, **mlps)).every


def test_the_list_says_what_is_here(server: Server) -> None:
    found = json.loads(run("models", "--json").stdout)["models"]
    assert [(one["name"], one["cached"]) for one in found] == [
        ("small-hub", False),
        ("small-again", False),
    ]
    assert not server.asked
    done = run("models", "small-hub", "--yes", "--json")
    assert [(one["name"], one["cached"]) for one in json.loads(done.stdout)["models"]] == [
        ("small-hub", True)
    ]
    assert "small-hub" in run("models").stdout
    there = json.loads(run("clean", "--caches", "--yes", "--json").stdout)["removed"]
    assert [(one["kind"], Path(one["path"]).name) for one in there] == [("cache", "small-hub")]
    assert not published_models.MODELS["small-hub"].is_cached


def test_a_name_is_fetched_once_and_then_works_offline(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert which_model("small-hub").published is published_models.MODELS["small-hub"]
    with pytest.raises(WeightsError, match="--yes"):
        lapclip.load("small-hub")
    assert not server.asked  # nothing is asked for before somebody agreed
    assert run("models", "small-hub", "--yes").returncode == 0
    assert not any("large.msgpack" in path for path in server.asked)
    server.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = lapclip.load("small-hub").encode_text(["a cat"])
    assert found.shape == (1, 24)
    assert not server.asked


def test_a_script_is_told_what_to_add(server: Server) -> None:
    done = run("eval", "small-hub", "scenes", "--json")
    assert done.returncode == 2
    assert "lapclip models small-hub --yes" in done.stderr
    assert f"{server.address}/someone/small" in done.stderr
    assert not server.asked


@pytest.mark.parametrize("answer", ["y", "n"])
def test_at_a_terminal_it_asks_first(
    answer: str, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: f"{answer}\n", raising=False)
    if answer == "y":
        assert fetch(published_models.MODELS["small-hub"]).is_dir()
    else:
        with pytest.raises(WeightsError, match="was not fetched"):
            fetch(published_models.MODELS["small-hub"])
        assert not server.asked
    assert f"{server.address}/someone/small" in capsys.readouterr().err


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_line_goes_on(server: Server, *, ranges: bool) -> None:
    server.cut, server.ranges = [1_000_000, 70_000], ranges
    assert run("models", "small-hub", "--yes").returncode == 0
    asked = [path.rpartition(" ")[2] for path in server.asked if "bytes=" in path]
    assert asked[:2] == (
        ["bytes=1000000-", "bytes=1070000-"] if ranges else ["bytes=1000000-", "bytes=70000-"]
    )
    assert published_models.MODELS["small-hub"].is_cached


@pytest.mark.parametrize("status", [None, 503])
def test_the_next_command_goes_on_where_the_last_one_broke_off(
    server: Server, status: int | None
) -> None:
    model = published_models.MODELS["small-hub"]
    server.cut = [2_000_000, *[0] * 9]
    with pytest.raises(WeightsError, match="2 MB of"):
        fetch(model, yes=True)
    assert not model.is_cached
    server.cut, server.asked = [], []
    if status:
        server.status = [status]
        with pytest.raises(WeightsError, match=rf"{status} .*2 MB of"):
            fetch(model, yes=True)
        server.asked.clear()
    fetch(model, yes=True)
    assert any(path.endswith("bytes=2000000-") for path in server.asked)
    assert model.is_cached


def test_a_part_of_another_version_is_never_gone_on_with(server: Server) -> None:
    model = published_models.MODELS["small-hub"]
    server.cut = [1_000_000, 0, 0, 0, 0, 0]
    with pytest.raises(WeightsError):
        fetch(model, yes=True)
    weights = server.folder / WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    server.cut, server.asked = [], []
    fetch(model, yes=True)
    assert not any("bytes=" in path for path in server.asked)
    assert (model.folder / WEIGHTS).read_bytes() == content
    assert not list(model.folder.glob(".*"))


def test_a_slow_line_is_waited_for_and_a_silent_one_is_not(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.delay = 0.02
    fetch(published_models.MODELS["small-hub"], yes=True)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    server.delay = 0.4
    with pytest.raises(WeightsError, match="timed out"):
        fetch(published_models.MODELS["small-again"], yes=True)


LIES = [
    # how the server behaves, what is said, and whether files are asked for at all
    ({"listing": {"sha256": "f" * 64}}, "digest", True),
    ({"listing": {"size": 5_000_000}}, "more than the announced 5,000,000 bytes", True),
    ({"listing": {"size": 1234}}, "another model", False),
    ({"listing": {"size": -5}}, "does not answer as", False),
    ({"listing": {"size": float("inf")}}, "does not answer as", False),
    ({"listing": {"size": "many"}}, "does not answer as", False),
    ({"listing": {"sha256": None}}, "does not answer as", False),
    ({"listing": {"sha256": "../x"}}, "does not answer as", False),
    ({"says_digests": False}, "does not answer as", False),
    ({"page": True}, "could not be downloaded", True),
    ({"redirect": "ftp://127.0.0.1/x"}, "could not be downloaded", True),
    ({"redirect": "file:///etc/passwd"}, "could not be downloaded", True),
]


@pytest.mark.parametrize(("behavior", "message", "asked"), LIES)
def test_what_a_lying_hub_sends_is_not_kept(
    behavior: dict[str, object], message: str, server: Server, *, asked: bool
) -> None:
    model = published_models.MODELS["small-hub"]
    honest = {name: getattr(server, name) for name in behavior}
    vars(server).update(behavior)
    with pytest.raises(WeightsError, match=message):
        fetch(model, yes=True)
    assert not model.is_cached
    assert not list(model.folder.glob("*.safetensors"))
    if "listing" in behavior:
        assert not list(model.folder.glob(".*unfinished"))
    assert any("resolve" in path for path in server.asked) == asked
    vars(server).update(honest)
    assert fetch(model, yes=True)


def test_files_may_come_from_elsewhere_and_are_checked(server: Server) -> None:
    server.redirect = server.address.replace("127.0.0.1", "localhost") + f"/elsewhere/{WEIGHTS}"
    fetch(published_models.MODELS["small-hub"], yes=True)
    assert f"GET /elsewhere/{WEIGHTS}" in server.asked


def test_what_changed_since_the_first_use_is_not_taken(server: Server) -> None:
    model = published_models.MODELS["small-hub"]
    fetch(model, yes=True)
    shutil.rmtree(model.folder)
    assert not model.is_cached
    for name in (WEIGHTS, "open_clip_config.json"):  # known by its SHA-256, and by git's SHA-1
        path = server.folder / name
        honest = path.read_bytes()
        path.write_bytes(honest[:-1] + bytes([honest[-1] ^ 1]))
        with pytest.raises(WeightsError, match="no longer what it was"):
            fetch(model, yes=True)
        assert not (model.folder / name).exists()
        path.write_bytes(honest)
    assert fetch(model, yes=True)


def test_what_changed_in_the_cache_is_not_opened(server: Server) -> None:
    model = published_models.MODELS["small-hub"]
    weights = fetch(model, yes=True) / WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(WeightsError, match="nothing of it was used"):
        fetch(model)
    assert not model.is_cached
    assert fetch(model, yes=True) == fetch(model)


def test_another_model_under_that_name_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = published_models.MODELS["small-hub"]
    other = replace(one, name="other", parameters=one.parameters + 1)
    monkeypatch.setitem(published_models.MODELS, other.name, other)
    fetch(other, yes=True)
    with pytest.raises(WeightsError, match=f"instead of {other.parameters:,}"):
        lapclip.load(other.name)
    larger = replace(one, name="larger", parameters=1)
    monkeypatch.setattr(published_models, "MAX_EXTRA_BYTES", 1000)
    with pytest.raises(WeightsError, match="another model"):
        fetch(larger, yes=True)


def test_a_full_disk_is_said_before(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = published_models.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(published_models.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(WeightsError, match="are free"):
        fetch(published_models.MODELS["small-hub"], yes=True)
    assert not any("resolve" in path for path in server.asked)


def test_the_hub_that_is_gone_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = run("search", ".", "a dog", "--model", "small-hub", "--yes")
    assert done.returncode == 2
    assert "127.0.0.1:9 cannot be reached" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


@pytest.mark.slow
def test_commands_take_the_names(server: Server) -> None:
    photos = Path("photos")
    photos.mkdir()
    for at, colour in enumerate(("red", "blue", "green")):
        Image.new("RGB", (40, 40), colour).save(photos / f"{at}.png")
        (photos / f"{at}.txt").write_text(f"a {colour} square")
    found = json.loads(
        run("search", "photos", "a red square", "--model", "small-hub", "--yes", "--json").stdout
    )
    assert (found["model"], found["indexed"]) == ("small-hub", 3)
    assert f"{server.address}/someone/small" in found["said"][0]
    again = json.loads(
        run("search", "photos", "a red square", "--json").stdout
    )  # the model that made the index
    assert again["model"] == "small-hub"
    assert again["results"] == found["results"]
    embedded = json.loads(
        run("embed", "photos", "--model", "small-hub", "--out", "a.npy", "--json").stdout
    )
    assert embedded["rows"] == 3
    scored = json.loads(
        run("eval", "small-again", "photos", "--split", "all", "--yes", "--json").stdout
    )
    assert scored["evaluation"]["candidates"] == 3
    exported = run("export", "small-hub", "--to", "openclip", "--json")
    assert json.loads(exported.stdout)["out"] == "small-hub-openclip", exported.stderr
    settings = (
        "data.train_pairs=32",
        "train.steps=1",
        "train.batch_size=8",
        "train.dtype=float32",
        "train.device=cpu",
    )
    trained = run(
        "train",
        "--from",
        "small-hub",
        "--name",
        "on",
        "--json",
        "--recipe",
        "full",
        *set_flags(*settings),
    )
    assert json.loads(trained.stdout)["state"] == "finished", trained.stderr


def test_a_name_that_is_almost_one_is_corrected(here: Path) -> None:
    done = run("search", ".", "a dog", "--model", "vit-b-32-laion")
    assert done.returncode == 2
    assert "vit-b-32-laion2b" in done.stderr
    assert "vit-b-32-laion2b" in run("models", "vit-b-32-laion").stderr


def test_runs_and_folders_win_over_published_models(here: Path, server: Server) -> None:
    folder = Path("small-hub")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert which_model("small-hub").published is None
    assert which_model("small-again").published is not None


def test_search_without_any_model_offers_one_that_fits(here: Path, empty_cache: Path) -> None:
    done = run("search", ".", "a dog")
    assert done.returncode == 2
    offered = re.search(r"search \. 'a dog' --model (\S+)", done.stderr)
    assert offered
    assert offered[1] in MODELS


def test_the_best_that_fits_is_the_best_of_its_size(empty_cache: Path) -> None:
    def best(memory: float, disk: float, *, accelerator: bool = False) -> str | None:
        found = best_that_fits(int(memory), int(disk), accelerator=accelerator)
        return found.name if found else None

    assert best(64e9, 1e12, accelerator=True) == "so400m-14-siglip-384"
    assert best(64e9, 1e12) == "vit-b-16-siglip"
    assert best(8e9, 3e9, accelerator=True) == "vit-b-16-siglip-384"
    assert best(3e9, 1e12) == "vit-b-16-laion2b"
    assert best(8e9, 1.2e9) == "vit-b-16-laion2b"
    assert best(8e9, 1e9) is None
    assert best(1e9, 1e12) is None
    assert best(8e9, 1e8) is None
