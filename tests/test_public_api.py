from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys

import lapclip

FUNCTIONS = ["connect", "evaluate", "export", "load", "open_run", "resume", "search", "train", "tune"]
TYPES = ["Callback", "Client", "Embedder", "Encoder", "Evaluation", "FolderSearch", "Found", "Interrupted"]
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
    program = (
        "import sys, lapclip; heavy = {'torch', 'numpy', 'PIL', 'rich'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(lapclip, "nothing")
