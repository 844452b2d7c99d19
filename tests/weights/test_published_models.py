"""Published models by their short names, from a hub and from addresses of our own: honest, slow, broken, lying."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import lapclip
from lapclip.errors import WeightsError
from lapclip.model.clip import CLIP, count_parameters
from lapclip.model.shapes import SHAPES
from lapclip.weights import download, openai, openclip, published_models
from lapclip.weights.published import KNOWN, Sizes
from lapclip.weights.published_models import MODELS, best_that_fits, fetch
from lapclip.which_model import which_model

from ..conftest import lapclip as run
from ..conftest import set_flags
from .made import SHAPE, embedder, save_openclip
from .stand_in import WEIGHTS, Server, served


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """A small model as it lies on the hub, and as OpenAI's files are."""
    folder = tmp_path_factory.mktemp("made")
    model = embedder(replace(SHAPE, context=77))
    there = save_openclip(model, folder / "on-the-hub")
    (there / "large.msgpack").write_bytes(b"not wanted")
    torch.save(openai.to_theirs(model.model.state_dict()), folder / "small.pt")
    return there, (folder / "small.pt").read_bytes(), count_parameters(model.model)


@pytest.fixture
def server(
    made: tuple[Path, bytes, int],
    tmp_path: Path,
    here: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Server]:
    """Two models by name, a cache of their own, no waiting between tries."""
    folder = tmp_path / "on-the-hub"
    folder.mkdir()
    for path in made[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    with served(Server(folder, *made[1:])) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.address)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("LAPCLIP_DATA", str(tmp_path / "data"))
        monkeypatch.setattr(download, "WAITS", (0.01,) * 3)
        monkeypatch.setattr(published_models, "MODELS", found.models())
        yield found


MILLIONS = {"vit-b-16-siglip": 203.16, "vit-b-16-siglip-256": 203.2, "vit-b-16-siglip-384": 203.45,
            "vit-l-16-siglip-256": 652.15, "vit-l-16-siglip-384": 652.48, "so400m-14-siglip-384": 877.96}  # fmt: skip
"""Parameters in OpenCLIP's docs/model_profile.csv."""
BOTH = pytest.mark.parametrize("name", ["small-hub", "small-file"])


def test_every_model_of_the_table_is_whole_and_its_parameters_are_those_of_its_shape() -> None:
    known = {name.lower(): counted(sizes) for name, sizes in KNOWN.items()}
    known["vit-b-32-256"] = counted(KNOWN["ViT-B-32"]._replace(image_size=256))
    small = CLIP(SHAPE)
    sizes = Sizes(*(getattr(SHAPE, field) for field in Sizes._fields))
    assert count_parameters(small) == counted(sizes, SHAPE.vocabulary, SHAPE.context)
    assert len(MODELS) >= 6
    for name, model in MODELS.items():
        if "siglip" not in name:
            assert model.parameters == known[name.rpartition("-")[0]], name
        elif name in MILLIONS:
            assert round(model.parameters / 1e6, 2) == MILLIONS[name], name
        if name != "vit-b-16-siglip2-384":  # its publishers give no such figures
            assert len(model.flickr30k) == len(model.coco) == 6, name
            assert set(model.to_dict()["recall"]) == {"flickr30k", "coco", "source"}
        assert all((model.bytes, model.bytes_source, model.licence, model.licence_source)), name
        assert model.page.startswith("https://"), name
        assert bool(model.pinned) == name.endswith("openai")
        assert {"name", "parameters", "bytes", "licence", "in_cache", "recall", "from"} <= set(
            model.to_dict()
        )


def counted(sizes: Sizes, vocabulary: int = 49_408, context: int = 77) -> int:
    """The parameters of a CLIP, added up by hand."""

    def blocks(layers: int, width: int, hidden: int) -> int:
        return layers * (4 * width * width + 2 * width * hidden + hidden + 9 * width)

    patches, width = (sizes.image_size // sizes.patch) ** 2, sizes.image_width
    image = (3 * sizes.patch**2 + patches + 6) * width + blocks(
        sizes.image_layers, width, sizes.image_hidden
    )
    text = (vocabulary + context + 2) * sizes.text_width + blocks(
        sizes.text_layers, sizes.text_width, sizes.text_hidden
    )
    return image + text + (width + sizes.text_width) * sizes.embedding + 1


def test_the_list_says_what_is_here(server: Server) -> None:
    found = json.loads(run("models", "--json").stdout)["models"]
    assert [(one["name"], one["in_cache"]) for one in found] == [
        ("small-hub", False),
        ("small-file", False),
    ]
    assert not server.asked
    done = run("models", "small-hub", "--yes", "--json")
    assert [(one["name"], one["in_cache"]) for one in json.loads(done.stdout)["models"]] == [
        ("small-hub", True)
    ]
    assert "small-hub" in run("models").stdout
    there = json.loads(run("clean", "models", "--yes", "--json").stdout)["removed"]
    assert [one["kind"] for one in there] == ["models"]
    assert not published_models.MODELS["small-hub"].in_cache


@BOTH
def test_a_name_is_fetched_once_and_then_works_offline(
    name: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert which_model(name).published is published_models.MODELS[name]
    with pytest.raises(WeightsError, match="--yes"):
        lapclip.load(name)
    assert not server.asked  # nothing is asked for before somebody agreed
    assert run("models", name, "--yes").returncode == 0
    assert not any("large.msgpack" in path for path in server.asked)
    server.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = lapclip.load(name).encode_text(["a cat"])
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


@BOTH
@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_line_goes_on(name: str, server: Server, *, ranges: bool) -> None:
    server.cut, server.status, server.ranges = [1_000_000, 70_000], [503], ranges
    assert run("models", name, "--yes").returncode == 0
    asked = [path.rpartition(" ")[2] for path in server.asked if "bytes=" in path]
    assert asked[:2] == (
        ["bytes=1000000-", "bytes=1070000-"] if ranges else ["bytes=1000000-", "bytes=70000-"]
    )
    assert published_models.MODELS[name].in_cache


@BOTH
def test_the_next_command_goes_on_where_the_last_one_broke_off(name: str, server: Server) -> None:
    model = published_models.MODELS[name]
    server.cut = [2_000_000, *[0] * 9]
    with pytest.raises(WeightsError, match="2 MB of"):
        fetch(model, yes=True)
    assert not model.in_cache
    server.cut, server.asked = [], []
    fetch(model, yes=True)
    assert any(path.endswith("bytes=2000000-") for path in server.asked)
    assert model.in_cache


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
    fetch(published_models.MODELS["small-file"], yes=True)
    monkeypatch.setattr(download, "SECONDS", 0.05)
    server.delay = 0.4
    with pytest.raises(WeightsError, match="no byte came"):
        fetch(published_models.MODELS["small-hub"], yes=True)


@BOTH
def test_what_is_not_as_announced_is_not_kept(name: str, server: Server) -> None:
    honest, model = server.file, published_models.MODELS[name]
    server.file = honest[:-1] + bytes([honest[-1] ^ 1])
    server.listing = {"sha256": "f" * 64}
    with pytest.raises(WeightsError, match="digest"):
        fetch(model, yes=True)
    assert not model.in_cache
    assert not any(
        path.suffix in (".pt", ".safetensors", ".unfinished") for path in model.folder.iterdir()
    )
    server.file, server.listing = honest, {}
    assert fetch(model, yes=True)


@BOTH
def test_a_file_of_another_size_is_refused_before_it_comes(name: str, server: Server) -> None:
    server.file, server.listing = server.file + b"more", {"size": 1234}
    with pytest.raises(WeightsError, match=r"another (file|model)"):
        fetch(published_models.MODELS[name], yes=True)


@pytest.mark.parametrize("size", [-5, float("inf"), "many"])
def test_sizes_that_are_none_are_not_believed(size: object, server: Server) -> None:
    server.listing = {"size": size}
    with pytest.raises(WeightsError, match="does not answer as"):
        fetch(published_models.MODELS["small-hub"], yes=True)


@BOTH
def test_a_page_in_place_of_the_file_is_said(name: str, server: Server) -> None:
    server.page = True
    with pytest.raises(WeightsError, match="web page"):
        fetch(published_models.MODELS[name], yes=True)


def test_files_may_come_from_elsewhere_and_are_checked(server: Server) -> None:
    server.redirect = server.address.replace("127.0.0.1", "localhost") + f"/elsewhere/{WEIGHTS}"
    fetch(published_models.MODELS["small-hub"], yes=True)
    assert f"GET /elsewhere/{WEIGHTS}" in server.asked


def test_files_without_a_digest_come_from_the_hub_alone(server: Server) -> None:
    server.redirect = server.address.replace("127.0.0.1", "localhost") + f"/elsewhere/{WEIGHTS}"
    server.says_digests = server.says_tags = False
    with pytest.raises(WeightsError, match="not to be trusted"):
        fetch(published_models.MODELS["small-hub"], yes=True)


def test_a_file_whose_size_nobody_says_may_not_be_larger_than_the_model(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "WAITS", ())
    address = f"{server.address}/someone/small/resolve/main/{WEIGHTS}"
    with pytest.raises(WeightsError, match="more than 1,000 bytes"):
        download.fetch_file(download.RemoteFile(WEIGHTS, address, None, "", most=1000), tmp_path)
    assert list(tmp_path.glob("*.safetensors*")) + list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("where", ["ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_nobody_is_sent_to_another_kind_of_place(where: str, server: Server) -> None:
    server.redirect = where
    with pytest.raises(WeightsError, match="not to be trusted"):
        fetch(published_models.MODELS["small-hub"], yes=True)


def test_a_listing_from_elsewhere_is_refused_and_https_never_becomes_http() -> None:
    def followed(here: str, there: str, *, same_host: bool) -> bool:
        handler = download._Redirects(same_host=same_host, follow=True)
        request = download.urllib.request.Request(here)
        try:
            return handler.redirect_request(request, None, 302, "", {}, there) is not None
        except WeightsError:
            return False

    assert followed("https://hub.example/a", "https://files.example/b", same_host=False)
    assert followed("https://hub.example/a", "https://hub.example/b", same_host=True)
    assert not followed("https://hub.example/a", "https://files.example/b", same_host=True)
    assert not followed("https://hub.example/a", "http://hub.example/b", same_host=False)


@pytest.mark.parametrize("says_digests", [True, False])
def test_what_changed_since_the_first_use_is_not_taken(
    server: Server, *, says_digests: bool
) -> None:
    server.says_digests = says_digests
    model = published_models.MODELS["small-hub"]
    fetch(model, yes=True)
    shutil.rmtree(model.folder)
    assert not model.in_cache
    weights = server.folder / WEIGHTS
    honest = weights.read_bytes()
    weights.write_bytes(honest[:-1] + bytes([honest[-1] ^ 1]))
    with pytest.raises(WeightsError, match="no longer what it was"):
        fetch(model, yes=True)
    assert not (model.folder / WEIGHTS).exists()
    weights.write_bytes(honest)
    assert fetch(model, yes=True)


@BOTH
def test_what_changed_in_the_cache_is_not_opened(name: str, server: Server) -> None:
    model = published_models.MODELS[name]
    weights = fetch(model, yes=True) / (WEIGHTS if name == "small-hub" else "small.pt")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(WeightsError, match="nothing of it was used"):
        fetch(model)
    assert not model.in_cache
    assert fetch(model, yes=True) == fetch(model)


def test_another_model_under_that_name_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = published_models.MODELS["small-hub"]
    other = replace(
        one, name="vit-b-32-other", parameters=MODELS["vit-b-32-laion2b"].parameters, bytes=None
    )
    monkeypatch.setitem(published_models.MODELS, other.name, other)
    fetch(other, yes=True)
    with pytest.raises(WeightsError, match="151,277,313"):
        lapclip.load(other.name)
    larger = replace(one, name="larger", bytes=1)
    monkeypatch.setattr(published_models, "SPARE", 1000)
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
@pytest.mark.parametrize("name", ["vit-b-32-openai", "vit-b-32-datacomp"])
def test_a_model_of_its_real_size_is_fetched_over_a_broken_line_and_read(
    name: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor has the size it has in the published file; only the numbers are others."""
    model = MODELS[name]
    with torch.device("meta"):
        sizes = {
            ours: tensor.shape for ours, tensor in CLIP(SHAPES["vit-b-32"]).state_dict().items()
        }
    tensors = openai.to_theirs(
        {ours: torch.zeros(shape, dtype=torch.float16) for ours, shape in sizes.items()}
    )
    config = openclip.config_of(
        replace(SHAPES["vit-b-32"], activation="gelu"), tokenizer_here=False
    )
    (server.folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file(tensors, server.folder / WEIGHTS)
    torch.save(tensors, path := server.folder / "ViT-B-32.pt")
    server.file = path.read_bytes()
    path.unlink()
    there = f"{server.address}/clip/{server.digest}/ViT-B-32.pt"
    here = (
        replace(model, origin=there, bytes=len(server.file))
        if model.pinned
        else replace(model, origin="someone/small")
    )
    monkeypatch.setitem(published_models.MODELS, name, here)
    server.cut = [200_000_000]
    assert run("models", name, "--yes").returncode == 0
    assert any(asked.endswith("bytes=200000000-") for asked in server.asked)
    found = lapclip.load(name)
    assert (found.view.side, found.embedding, found.context) == (224, 512, 77)


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
        run("eval", "small-file", "photos", "--split", "all", "--yes", "--json").stdout
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
    assert which_model("small-file").published is not None


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
    assert best(8e9, 1e9) == "vit-b-16-openai"
    assert best(1e9, 1e12) is None
    assert best(8e9, 1e8) is None
