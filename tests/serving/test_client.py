"""`lapclip.connect`: the calls of a loaded model, over HTTP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lapclip
from lapclip.serving.refusals import TooMany

from .conftest import Serving, jpeg


def test_the_same_calls_give_the_same_vectors(served: Serving, tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.jpg" for seed in range(40)]  # more than one request holds
    for seed, path in enumerate(paths):
        path.write_bytes(jpeg(seed))
    captions = [f"{number} red cats" for number in range(70)]
    with lapclip.connect(served.url) as model:
        assert np.abs(model.encode_image(paths) - served.encoder.encode_image(paths)).max() < 1e-5
        opened = [Image.open(path) for path in paths[:2]]
        assert np.abs(model.encode_image(opened) - served.encoder.encode_image(paths[:2])).max() < 1e-5
        assert np.abs(model.encode_text(captions) - served.encoder.encode_text(captions)).max() < 1e-5
        assert model.encode_text([]).shape == (0, model.embedding)
        assert model.fingerprint() == served.encoder.fingerprint()


def test_errors_name_the_item_and_the_server(served: Serving, tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.jpg" for seed in range(40)]
    for seed, path in enumerate(paths):
        path.write_bytes(jpeg(seed) if seed != 37 else b"not an image")
    with lapclip.connect(served.url) as model:
        with pytest.raises(lapclip.LapclipError, match="Item 37: "):
            model.encode_image(paths)
        with pytest.raises(TypeError):
            model.encode_text("a cat")
    with pytest.raises(lapclip.LapclipError, match="does not answer"):
        lapclip.connect("http://127.0.0.1:9")
    with pytest.raises(lapclip.LapclipError, match="0123456789abcdef"):
        lapclip.connect(served.url, fingerprint="0123456789abcdef").encode_text(["a cat"])


def test_a_busy_server_is_asked_again(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    embed, asked = served.service.embed, []

    async def busy_once(*arguments: object, **options: object) -> object:
        asked.append(1)
        if len(asked) == 1:
            raise TooMany("The queue is full.", retry_after=1)
        return await embed(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(served.service, "embed", busy_once)
    with lapclip.connect(served.url) as model:
        assert model.encode_text(["a patient cat"]).shape == (1, model.embedding)
    assert len(asked) == 2


def test_it_needs_no_torch() -> None:
    program = "import sys, lapclip; lapclip.connect; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
