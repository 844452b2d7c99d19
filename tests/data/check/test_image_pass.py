from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapclip.data.check_data import AT_ONCE, inspect_image, inspect_images
from lapclip.data.table import ImageFile
from tests.conftest import examples

from .made import encoded, odd_images, scene

FILES = list(odd_images().values())


@settings(max_examples=examples(60))
@given(
    data=st.sampled_from(FILES),
    changes=st.lists(
        st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=6)), max_size=6
    ),
    share=st.floats(0, 1),
)
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_are_an_image_or_a_fault_and_never_an_error(
    data: bytes, changes: list[tuple[int, bytes]], share: float
) -> None:
    damaged = bytearray(data)
    for at, new in changes:
        start = at % max(1, len(damaged))
        damaged[start : start + len(new)] = new
    seen = inspect_image(bytes(damaged[: int(len(damaged) * share)]))
    assert bool(seen.fault) != bool(seen.thumbnail)


def test_the_same_bytes_give_the_same_digest_and_others_another() -> None:
    first, again, other = (
        inspect_image(FILES[0]),
        inspect_image(bytes(FILES[0])),
        inspect_image(FILES[1]),
    )
    assert first == again
    assert first.digest != other.digest


def test_every_image_is_seen_in_order_and_a_missing_one_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(scene(1)))
    here, gone = ImageFile(tmp_path / "a.jpg", "a.jpg"), ImageFile(tmp_path / "b.jpg", "b.jpg")
    told: list[tuple[int, int]] = []
    seen = inspect_images(
        [here, gone, *[here] * AT_ONCE], lambda done, total: told.append((done, total))
    )
    assert [facts.fault != "" for facts in seen] == [False, True, *[False] * AT_ONCE]
    assert "no such file" in seen[1].fault
    assert told == [(AT_ONCE, AT_ONCE + 2), (AT_ONCE + 2, AT_ONCE + 2)]
    assert (seen[0].width, seen[0].height) == (160, 120)
