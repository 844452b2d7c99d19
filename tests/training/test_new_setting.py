"""A setting without a flag takes two files: config.py and its consumer."""

from __future__ import annotations

from pathlib import Path

from lapclip.runs.events import read_events

from ..changed_copy import ChangedCopy

SETTING = '''    lowest_rate: float = setting(0.0, least=0.0)
    """The learning rate never falls below this after the warm-up."""
'''
CONSUMER = """    if step > warmup:
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 1 - warmup) / max(1, steps - warmup)))
        return max(config.lowest_rate, config.learning_rate * cosine)
"""


def test_a_new_setting_takes_config_and_its_consumer(tmp_path: Path) -> None:
    copy = ChangedCopy(tmp_path)
    copy.insert("config.py", "    symbol_dropout: float", SETTING)
    copy.insert("training/schedule.py", "    if step <= warmup:\n", CONSUMER)
    run = copy.train("lowest_rate=0.0004", "train.learning_rate=0.001")
    assert len(copy.touched) == 2
    rates = [event["lr"] for event in read_events(run.events) if event["type"] == "step"]
    assert rates[-1] == min(rates[2:]) == 0.0004
    assert run.read_settings()["train"]["lowest_rate"] == 0.0004
