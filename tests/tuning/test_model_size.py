"""What is known of a model from its size."""

from __future__ import annotations

import pytest

from lapclip.model.shapes import SHAPES
from lapclip.tuning.model_size import count_operations


@pytest.mark.parametrize(("name", "operations"), [("seed", 606.8e9), ("photos", 22.8e9)])
def test_operations_of_a_step_are_those_of_its_products(name: str, operations: float) -> None:
    """Sums over the products of all layers: a kernel that the counter cannot look into would be missing."""
    assert count_operations(SHAPES[name], 12, 32) == pytest.approx(operations, rel=0.01)
