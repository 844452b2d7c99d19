from __future__ import annotations

import subprocess
import sys

import lapclip


def test_the_public_names_are_these_and_all_there() -> None:
    assert lapclip.__all__ == ["Embedder", "LapclipError", "__version__", "connect", "load"]
    assert sorted(lapclip.__all__) == dir(lapclip)
    for name in lapclip.__all__:
        assert getattr(lapclip, name) is not None


def test_importing_lapclip_loads_nothing_heavy() -> None:
    program = (
        "import sys, lapclip; heavy = {'torch', 'numpy', 'PIL', 'rich'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(lapclip, "nothing")
