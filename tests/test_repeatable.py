"""`make test` gives the same result each time: generated examples are the same ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
FAILING = """
from hypothesis import given, strategies as st
from tests.conftest import examples

def test_number_of_examples():
    assert examples(40) == 200

@given(st.integers())
def test_small(number):
    assert number < 1000
"""


def drawn() -> list[int]:
    numbers: list[int] = []

    @given(st.integers())
    def record(number: int) -> None:
        numbers.append(number)

    record()
    return numbers


def test_examples_are_the_same_each_time() -> None:
    if not settings().derandomize:
        pytest.skip("this run asks for random examples")
    numbers = drawn()
    assert len(numbers) > 20
    assert drawn() == numbers


def test_random_examples_print_how_to_repeat_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    options = ["-p", "tests.conftest", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    command = [sys.executable, "-m", "pytest", "-q", *options, "--hypothesis-profile=random"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "@reproduce_failure(" in done.stdout
