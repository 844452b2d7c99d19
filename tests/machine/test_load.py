from __future__ import annotations

import psutil
import pytest

from lapclip.machine import other_load as load

real = load.other_load


def test_the_share_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 40.0)
    assert real() == 0.4


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(interval: float) -> float:
        raise OSError

    monkeypatch.setattr(psutil, "cpu_percent", refuses)
    assert real() is None
    monkeypatch.setattr(load, "other_load", real)
    assert load.busy_cores() is None


@pytest.mark.parametrize(("share", "said"), [(0.0, None), (0.24, None), (0.6, "other programs use 60% of the cores")])
def test_busy_cores_are_put_into_words(share: float, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "other_load", lambda: share)
    assert (load.busy_cores() or "").startswith(said or "")
    assert (load.busy_cores() is None) == (said is None)
