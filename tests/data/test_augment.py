from __future__ import annotations

import numpy as np
import pytest
import torch

from lapclip.data.pixels import draw_boxes, names_sides, view


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def none_sided(count: int = 1000) -> np.ndarray:
    return np.zeros(count, dtype=bool)


def test_the_whole_image_at_its_own_size_is_not_touched() -> None:
    pixels = torch.rand(2, 3, 8, 8)
    assert view(pixels, None, 8) is pixels


@pytest.mark.parametrize("smallest", [0.4, 0.9])
def test_boxes_stay_inside_and_keep_enough(smallest: float) -> None:
    boxes = draw_boxes(none_sided(), np.ones(1000), smallest, 0.5, draw())
    left, top, width, height, flipped = boxes.unbind(1)
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (left + width <= 1 + 1e-6).all()
    assert (top + height <= 1 + 1e-6).all()
    area = width * height
    assert area.min() >= smallest - 1e-6
    assert area.min() < smallest + 0.05
    assert area.max() > 0.95
    assert ((width / height).log().abs() > 0.02).any()
    assert flipped.mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("aspect", [0.3, 0.75, 1.5, 4.0])
def test_boxes_of_squeezed_images_show_them_undistorted(aspect: float) -> None:
    aspects = np.full(1000, aspect)
    left, top, width, height, _ = draw_boxes(none_sided(), aspects, 0.3, 0.5, draw()).unbind(1)
    seen = width * aspect / height
    assert seen.min() >= 3 / 4 - 1e-4
    assert seen.max() <= 4 / 3 + 1e-4
    assert (left + width <= 1 + 1e-6).all()
    assert (top + height <= 1 + 1e-6).all()
    middle = draw_boxes(none_sided(), aspects, 1.0, 0.0, draw())[0]
    share = min(aspect, 1 / aspect)
    expected = [(1 - share) / 2, 0, share, 1] if aspect > 1 else [0, (1 - share) / 2, 1, share]
    assert middle[:4].tolist() == pytest.approx(expected, abs=1e-6)


def test_images_whose_captions_name_a_side_are_never_flipped() -> None:
    assert names_sides("a cup on the left")
    assert names_sides("RIGHT of the door")
    assert names_sides("the leftmost cup")
    assert names_sides("on the right-hand page")
    assert not names_sides("a bright leftover")
    sided = none_sided()
    sided[::2] = True
    boxes = draw_boxes(sided, np.ones(1000), 1.0, 1.0, draw())
    assert boxes[:, 4].tolist() == [0.0, 1.0] * 500
    assert (boxes[:, :4] == torch.tensor([0.0, 0.0, 1.0, 1.0])).all()


def test_the_whole_box_is_the_image_and_a_flip_mirrors_it() -> None:
    pixels = torch.rand(2, 3, 8, 8)
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0, 1.0]])
    same, mirrored = view(pixels, boxes, 8)
    torch.testing.assert_close(same, pixels[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(mirrored, pixels[1].flip(-1), atol=1e-5, rtol=0)


def test_a_box_is_the_part_it_names() -> None:
    pixels = torch.zeros(1, 3, 8, 8)
    pixels[:, :, :4, 4:] = 1  # the upper right quarter
    upper_right, upper_left = (torch.tensor([[left, 0.0, 0.5, 0.5, 0.0]]) for left in (0.5, 0.0))
    assert view(pixels, upper_right, 4)[:, :, 1:-1, 1:-1].min() == 1
    assert view(pixels, upper_left, 4)[:, :, 1:-1, 1:-1].max() == 0


@pytest.mark.parametrize("side", [8, 4, 2])
def test_smaller_images_are_means_with_and_without_a_box(side: int) -> None:
    pixels = torch.rand(1, 3, 8, 8)
    wanted = torch.nn.functional.avg_pool2d(pixels, 8 // side)
    torch.testing.assert_close(view(pixels, None, side), wanted)
    torch.testing.assert_close(
        view(pixels, torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0]]), side), wanted, atol=1e-5, rtol=0
    )


def test_sizes_that_do_not_divide_work_too() -> None:
    pixels = torch.full((1, 3, 8, 8), 0.5)
    torch.testing.assert_close(view(pixels, None, 6), torch.full((1, 3, 6, 6), 0.5))


def test_a_model_that_sees_less_than_the_middle_square_is_trained_on_that() -> None:
    boxes = draw_boxes(
        np.zeros(1, bool), np.array([2.0]), 1.0, 0.0, np.random.default_rng(0), middle=0.875
    )
    left, top, width, height, _ = boxes[0].tolist()
    assert (width, height) == (0.875 / 2, 0.875)  # of an image twice as wide as high
    np.testing.assert_allclose([left + width / 2, top + height / 2], [0.5, 0.5], atol=1e-6)
