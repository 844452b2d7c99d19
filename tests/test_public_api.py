from __future__ import annotations

import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lapclip

FUNCTIONS = [
    "connect",
    "evaluate",
    "export",
    "load",
    "open_run",
    "resume",
    "search",
    "train",
    "tune",
]
TYPES = [
    "Callback",
    "Client",
    "Embedder",
    "Encoder",
    "Evaluation",
    "FolderSearch",
    "Found",
    "Interrupted",
]
LOAD_GOMP = (
    "import ctypes; from importlib.util import find_spec; from pathlib import Path; "
    "packages = Path(find_spec('torch').origin).parents[1]; "
    "found = [*packages.glob('torch/lib/libgomp*'), *packages.glob('torch.libs/libgomp*')]; "
    "ctypes.CDLL(found[0])"
)
"""Load what prints the setting, without the rest of torch."""
TYPES += ["LapclipError", "StopTraining", "TrainingRun"]


def test_the_public_names_are_these_and_all_there() -> None:
    assert lapclip.__all__ == [*TYPES, "__version__", *FUNCTIONS[:2], "events", *FUNCTIONS[2:]]
    assert sorted(lapclip.__all__) == dir(lapclip)
    assert all(inspect.isfunction(getattr(lapclip, name)) for name in FUNCTIONS)
    assert all(inspect.isclass(getattr(lapclip, name)) for name in TYPES)
    assert lapclip.events.Step.type == "step"


def test_no_module_takes_the_place_of_a_function() -> None:
    names = {module.name for module in pkgutil.iter_modules(lapclip.__path__)}
    assert not names & set(lapclip.__all__)


def test_importing_lapclip_loads_nothing_heavy() -> None:
    program = "import sys, lapclip; heavy = {'torch', 'numpy', 'PIL', 'rich', 'httpx2', 'huggingface_hub'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(lapclip, "nothing")


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux alone")
def test_large_tensors_have_large_pages_where_linux_gives_them_to_who_asks() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    offered = setting.exists() and "[madvise]" in setting.read_text(encoding="ascii")
    program = (
        "import torch, lapclip; numbers = torch.ones(64_000_000); "
        "print(sum(int(line.split()[1]) for line in open('/proc/self/smaps') if line.startswith('AnonHugePages')))"
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"
    }
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment
    )
    assert done.stderr == ""
    assert not offered or int(done.stdout) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only libgomp prints how long its threads spin")
@pytest.mark.parametrize(
    ("program", "user_setting", "spins"),
    [
        ("import lapclip, torch", {}, "2000"),
        (f"import lapclip.cli.app; {LOAD_GOMP}", {}, "2000"),
        (f"import lapclip; {LOAD_GOMP}", {"GOMP_SPINCOUNT": "77"}, "77"),
        (f"import lapclip; {LOAD_GOMP}", {"OMP_WAIT_POLICY": "PASSIVE"}, "0"),
        ("import torch, lapclip", {}, None),
    ],
)
def test_threads_spin_shortly_unless_torch_is_loaded_or_the_user_chose(
    program: str, user_setting: dict[str, str], spins: str | None
) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **user_setting}
    program += "; import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment
    )
    displayed = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert displayed is not None, done.stderr
    if spins is None:  # what torch read stays, and children are not changed either
        assert done.stdout.strip() == "None"
        assert displayed[1] not in ("2000", "0")
    else:
        assert displayed[1] == spins
