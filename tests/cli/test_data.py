"""`lapclip data`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

from ..conftest import lapclip
from ..data.check.made import odd_folder

TINY = ("--set", "model.name=tiny")
"""Steps of the model are timed."""


def test_check_prints_one_json_object(here: Path) -> None:
    odd_folder(here)
    done = lapclip("data", "check", ".", "--recipe", "first-run", *TINY, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["images"] == 16
    assert {"kind", "count", "examples"} <= set(found["findings"][0])


def test_check_says_the_gravest_first_and_ends_with_the_next_command(here: Path) -> None:
    odd_folder(here)
    done = lapclip("data", "check", ".", "--recipe", "first-run", "--set", "data.seed=0", *TINY)
    lines = done.stdout.splitlines()
    assert lines[0] == ".  16 images, 20 captions, of which 14 images can be used"
    assert any(
        "splits" in line and "train 12, val 2" in line for line in lines
    )  # of those that can be used
    assert any("few held-out images (val " in line for line in lines)
    assert "cannot be read" in lines[lines.index("findings") + 1]
    assert lines[-1].startswith("Next: ")
    kept = "--recipe first-run --set data.seed=0 --set model.name=tiny"
    assert (
        f"train . {kept} --set data.broken_share=0.13, or mend" in lines[-1]
    )  # two of sixteen cannot be read


def test_data_that_is_not_there_is_the_users_input(here: Path) -> None:
    done = lapclip("data", "check", "nowhere")
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_writes_a_page_and_leaves_the_users_own_files_alone(here: Path) -> None:
    odd_folder(here)
    words = ["data", "check", ".", "--recipe", "first-run", *TINY, "--page", "pairs.html"]
    done = lapclip(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["page"] == "pairs.html"
    assert "Random pairs" in (here / "pairs.html").read_text(encoding="utf-8")
    (here / "pairs.html").write_text("my own page")
    done = lapclip(*words)
    assert done.returncode == 2
    assert "was not written by lapclip" in done.stderr
    assert "--page with another file" in done.stderr
