"""The README and the pages of docs/: every page is in the site's order, every link leads somewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import SMALL, lapclip, set_flags

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md")), "docs/llms.txt"]
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its blocks of code, and without code in its lines."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", "`code`", text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and the site with its slugify."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


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
    before, tour, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## A tour of the code\n")
    assert tour
    assert len(before.split()) <= 700


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_a_page_begins_with_its_title_and_says_what_it_is_for(page: str) -> None:
    text = re.sub(r"<!--.*?-->", "", prose(ROOT / page), flags=re.DOTALL).strip()
    title, _, rest = text.partition("\n")
    assert title.startswith("# ")
    assert re.search(r"^[\w*`\"\[(].{20}", rest.split("\n## ")[0], re.MULTILINE), "no sentence before the first section"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_asks_no_other_computer(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    built = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    checked = subprocess.run(
        [sys.executable, DOCS / "check_site.py", tmp_path / "site"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert {path.stem for path in DOCS.glob("*.md")} <= {path.stem for path in (tmp_path / "site").glob("*.html")}


def names_in(value: Any) -> set[str]:
    """All names in an object, at any depth."""
    if isinstance(value, dict):
        return set(value).union(*map(names_in, value.values()))
    return set().union(*map(names_in, value)) if isinstance(value, list) else set()


@pytest.mark.slow
def test_json_objects_have_the_names_that_the_page_promises(here: Path) -> None:
    trained = lapclip("train", "--name", "mine", "--json", *set_flags(*SMALL))
    results = {"train": json.loads(trained.stdout)}
    for command in (
        ["model", "mini"], ["eval", "mine"], ["runs"], ["watch", "mine", "--once"], ["doctor", "mine"], ["machine"],
        ["tune", "--seconds", "5", *set_flags(*SMALL)], ["data", "check", "scenes"], ["report", "mine"], ["models"],
        ["clean"], ["export", "mine", "--to", "onnx"],
    ):  # fmt: skip
        results[command[0]] = json.loads(lapclip(*command, "--json").stdout)
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", (DOCS / "json.md").read_text(encoding="utf-8"), re.MULTILINE)
    checked = 0
    for commands, names in rows:
        for command in re.findall(r"`(\w+)[^`]*`", commands):
            if command in results and "--web" not in commands:
                names = re.sub(r"; (for classes|short).*", "", names)
                promised = set(re.findall(r"`(\w+)`", names))
                assert promised - names_in(results[command]) == set(), command
                checked += 1
    assert checked == len(results)
