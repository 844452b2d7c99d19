"""The README and the pages of docs/: every page is in the site's order, every link leads somewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lapclip.commands.join import Joined
from lapclip.machine.canary import PRECISIONS, checks

from .conftest import SMALL, lapclip, set_flags
from .small_runs import photos, stop_after, train_small

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md")), "docs/llms.txt"]
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its blocks of code, and without code in its lines."""
    text = re.sub(
        r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"`[^`\n]+`", "`code`", text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and the site with its slugify."""
    text = re.sub(
        r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    titles = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_table_of_clusters_is_what_its_script_prints() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "cluster_estimate.py")]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert printed.strip() in (DOCS / "clusters.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_order_of_the_site_once() -> None:
    listed = re.findall(r": (\w+\.md)$", SITE[SITE.index("\nnav:") :], flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(ROOT / page)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.is_file(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_the_readme_comes_to_the_point() -> None:
    before, tour, _ = (
        (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## A tour of the code\n")
    )
    assert tour
    assert len(before.split()) <= 760


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_a_page_begins_with_its_title_and_says_what_it_is_for(page: str) -> None:
    text = re.sub(r"<!--.*?-->", "", prose(ROOT / page), flags=re.DOTALL).strip()
    title, _, rest = text.partition("\n")
    assert title.startswith("# ")
    assert re.search(r"^[\w*`\"\[(].{20}", rest.split("\n## ")[0], re.MULTILINE), (
        "no sentence before the first section"
    )


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_asks_no_other_computer(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    built = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    checked = subprocess.run(
        [sys.executable, DOCS / "check_site.py", tmp_path / "site"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert {path.stem for path in DOCS.glob("*.md")} <= {
        path.stem for path in (tmp_path / "site").glob("*.html")
    }


class Promise(NamedTuple):
    """What docs/json.md says of the object of one command."""

    names: set[str]
    """Of the object itself."""
    within: list[tuple[str, bool, set[str]]]
    """Names of it that hold objects: the name, whether there are several of them, and what each has."""


def promises() -> dict[str, Promise]:
    """The rows of docs/json.md by command. What holds for data with classes only is under its own key."""
    found: dict[str, Promise] = {}
    rows = re.findall(
        r"^\| (`.+?) \| (.+) \|$", (DOCS / "json.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    for commands, text in rows:
        plain = re.sub(r"\([^()]*\)", "", re.sub(r"\[[^]]*\]\([^)]*\)", "", text))
        for command in re.findall(r"`([a-z -]+?)(?: [A-Z]+)?`", commands):
            for clause in plain.split(";"):
                key = (
                    f"{command} with classes"
                    if clause.strip().startswith("for classes")
                    else command
                )
                promise = found.setdefault(key, Promise(set(), []))
                before, joint, after = [
                    *re.split(r"(,? each with|:| with) ", clause, maxsplit=1),
                    "",
                    "",
                ][:3]
                names, inside = (re.findall(r"`(\w+)`", part) for part in (before, after))
                promise.names.update(names or inside)
                if names and inside:
                    promise.within.append((names[-1], "each" in joint, set(inside)))
    return found


def check_promise(command: str, result: dict[str, Any]) -> None:
    names, within = promises()[command]
    assert names - set(result) == set(), command
    for name, several, inside in within:
        elements = result[name] if several else [result[name]]
        assert elements, f"{command}: {name} is empty, so nothing in it was looked at"
        for element in elements:
            assert inside - set(element) == set(), f"{command}: {name}"


CHEAP = {
    "model": ["model", "mini"],
    "runs": ["runs"],
    "watch": ["watch", "mine", "--once"],
    "doctor": ["doctor", "mine"],
    "machine": ["machine"],
    "claims": ["claims", "--only", "19", "28"],
    "data check": [
        "data",
        "check",
        "photos",
        "--recipe",
        "first-run",
        *set_flags("model.name=tiny"),
    ],
    "report": ["report", "mine"],
    "search": ["search", "photos", "a red wall", "--model", "mine"],
    "embed": ["embed", "photos", "--model", "mine", "--out", "vectors.npy"],
    "models": ["models"],
    "clean": ["clean"],
    "eval": ["eval", "mine", "--device", "cpu"],
    "eval with classes": ["eval", "mine", "classes", "--device", "cpu"],
}
DEAR = {
    "train": ["train", "--name", "other", *set_flags(*SMALL)],
    "resume": ["resume", "stopped"],
    "tune": ["tune", "--seconds", "5", *set_flags(*SMALL)],
    "compare": ["compare", "--seconds", "5"],
    "probe": ["probe", "scenes", "--images", "40", *set_flags("data.train_pairs=64")],
    "export": ["export", "mine", "--to", "onnx"],
}
ELSEWHERE = {"stop", "serve", "watch --web", "search --web"}
"""What works until it is stopped: tests/commands/test_background.py, tests/serving and the tests of the pages."""


def test_every_json_object_of_the_page_is_tried() -> None:
    assert {*CHEAP, *DEAR, *ELSEWHERE, "join"} == set(promises())


def test_what_a_guest_reports_has_the_names_that_the_page_promises() -> None:
    check_promise("join", Joined("192.168.1.20:29400", 1.0, 2).to_dict())


@pytest.fixture
def with_a_run(here: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("lapclip.commands.data.towers_installed", lambda: False)
    shutil.copytree(trained, here / "runs" / "mine")
    photos(here / "photos")
    for at, image in enumerate(sorted((here / "photos").glob("*.png"))):
        folder = here / "classes" / ("red", "green", "blue")[at % 3]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, folder)
    for ending in ("png", "txt"):  # something for `data check` to find
        shutil.copy(here / "photos" / f"000.{ending}", here / "photos" / f"copy.{ending}")
    return here


@pytest.mark.parametrize("command", CHEAP)
def test_json_objects_have_the_names_that_the_page_promises(command: str, with_a_run: Path) -> None:
    done = lapclip(*CHEAP[command], "--json")
    assert done.returncode == 0, done.stderr
    check_promise(command, json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("command", DEAR)
def test_json_objects_of_commands_that_take_a_while(command: str, with_a_run: Path) -> None:
    if command == "resume":
        train_small(name="stopped", callbacks=stop_after(4, "stopped"))
    done = lapclip(*DEAR[command], "--json")
    assert done.returncode == 0, done.stderr
    check_promise(command, json.loads(done.stdout))


def test_the_canary_makes_as_many_checks_as_the_page_says() -> None:
    made = {
        name: len(list(checks(torch.device("cpu"), getattr(torch, name)))) for name in PRECISIONS
    }
    text = " ".join((DOCS / "machine.md").read_text(encoding="utf-8").split())
    full, half = made["float32"], made["bfloat16"]
    assert made["float16"] == half
    assert f"{full} checks in float32 and {half} in each half precision" in text
    assert f"{full + half} in all" in text
    assert f"all {full + 2 * half}" in text
    assert f"{full} checks in float32 and {half} in float16" in (DOCS / "platforms.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    "page", [*PAGES, "dev/CONTRIBUTING.md", "deploy/README.md", "examples/first_run.ipynb"]
)
def test_extras_are_in_double_quotes_which_every_shell_takes(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not re.search(r"'(?:[\w./-]*lapclip|\.)\[", text)
