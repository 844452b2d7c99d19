from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lapclip.measure.memory import Memory, Question

QUESTION = Question("linear", ["chip cpu torch 2.13.0"], {"batch": 8, "forms": ["torch", "onednn"]})


def test_an_answer_belongs_to_its_question_and_hardware(empty_cache: Path) -> None:
    memory = Memory("winners.json")
    assert memory.recall(QUESTION) is None
    memory.remember(QUESTION, ["onednn", "1 ms against 2 ms torch"])
    assert Memory("winners.json").recall(QUESTION) == ["onednn", "1 ms against 2 ms torch"]
    for other in (
        replace(QUESTION, about="attention"),
        replace(QUESTION, hardware=["chip cpu torch 2.14.0"]),
        replace(QUESTION, details={"batch": 9, "forms": ["torch", "onednn"]}),
    ):
        assert memory.recall(other) is None
    reordered = {"forms": ["torch", "onednn"], "batch": 8}
    assert memory.recall(replace(QUESTION, details=reordered)) is not None


def test_a_damaged_file_is_ignored_with_a_warning(
    empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_cache / "winners.json").write_text("[")
    memory = Memory("winners.json")
    assert memory.recall(QUESTION) is None
    assert "damaged" in capsys.readouterr().err
    memory.remember(QUESTION, "torch")
    assert memory.recall(QUESTION) == "torch"
