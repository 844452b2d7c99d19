"""How measurements tell people who wait what is being measured."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str], None]
"""Called with what is being measured, where nobody knows how much will follow."""
Notice = Callable[[int, int, str], None]
"""Called with how much is done, how much there is, and what comes next."""
