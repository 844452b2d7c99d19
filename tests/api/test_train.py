"""Training from Python: the same as the command, in threads, with callbacks, interrupted and resumed."""

from __future__ import annotations

import json
import pickle
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lapclip
from lapclip.errors import ConfigError, DataError, RunBusy, RunError
from lapclip.runs.events import Event, read_events

from ..conftest import SMALL
from ..conftest import lapclip as run_command
from ..small_runs import losses, photos

SETTINGS: dict[str, Any] = {
    name: float(value) if value.replace(".", "").isdigit() else value
    for name, value in (setting.split("=") for setting in SMALL)
}
SETTINGS |= {name: int(value) for name, value in SETTINGS.items() if value in (1, 12, 16, 64)}


def of_scenes(**options: Any) -> lapclip.TrainingRun:
    return lapclip.train(settings=SETTINGS, progress=False, **options)


def of_pairs(data: Any, **options: Any) -> lapclip.TrainingRun:
    return lapclip.train(data, recipe="first-run", settings=SETTINGS, progress=False, **options)


def wall_pairs(folder: Path) -> list[tuple[Image.Image, list[str]]]:
    paths = sorted(photos(folder).glob("*.png"))
    return [(Image.open(path), path.with_suffix(".txt").read_text().splitlines()) for path in paths]


def in_thread(work) -> Any:
    """What a function gives or raises in a thread that is not the main one."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    return found[0]


def test_a_run_from_a_thread_gives_the_losses_of_the_command(here: Path, trained: Path) -> None:
    done = run_command(
        "train", "--name", "typed", *(word for setting in SMALL for word in ("--set", setting))
    )
    assert done.returncode == 0, done.stderr
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    seen: list[Event] = []
    settings = SETTINGS | {"train.batch_size": np.int64(16)}
    run = in_thread(
        lambda: lapclip.train(
            name="called", settings=settings, progress=False, callbacks=[seen.append]
        )
    )
    assert isinstance(run, lapclip.TrainingRun), run
    assert losses("called") == losses("typed") != {}
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before

    # The run, as Python sees it.
    assert run.state == "finished"
    assert [row["loss"] for row in run.history] == list(losses("typed").values())
    ending = list(read_events(run.path / "events.jsonl"))[-1]
    assert run.metrics == ending["evaluation"]
    assert run.evaluations[-1]["step"] == 12
    assert run.settings["train"]["steps"] == 12
    assert run.model.encode_text("a red cat").shape == (64,)
    # Callbacks get what the file gets, in that order.
    written = [
        {name: value for name, value in event.items() if name != "time"} for event in run.events
    ]
    told = [
        {name: value for name, value in event.to_dict(0).items() if name != "time"}
        for event in seen
    ]
    assert told == written
    # Wherever a model is named, the run itself will do.
    assert lapclip.open_run("called").path == run.path == Path(lapclip.load(run).source)
    assert "finished" in repr(run)
    assert "12 of 12 steps" in repr(run)


def test_an_interrupt_saves_and_the_run_goes_on_to_the_same_losses(
    here: Path, trained: Path
) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, lapclip.events.Step) and event.step == 4:
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(lapclip.Interrupted, match=r"lapclip\.resume") as caught:
        of_scenes(name="cut", callbacks=[interrupt])
    assert signal.getsignal(signal.SIGINT) is handler
    run = caught.value.run
    assert run.state == "stopped"
    assert 4 <= len(run.history) < 12
    assert not run.metrics  # there was no evaluation yet
    assert "lapclip.resume" in caught.value._render_traceback_()[0]
    steps: list[int] = []

    def broken(event: Event) -> None:
        steps.append(getattr(event, "step", 0))
        raise ZeroDivisionError("my own fault")

    with pytest.warns(RuntimeWarning, match="my own fault"):
        resumed = lapclip.resume(run, callbacks=[broken], progress=False)
    assert len(steps) == 1, "it is not called again, and the run goes on"
    assert steps[0] >= 4
    assert resumed.state == "finished"
    assert resumed.history[-1]["loss"] == losses_of(trained)[12]
    assert losses("cut") == losses_of(trained)
    with pytest.raises(RunError, match="finished"):
        lapclip.resume(progress=False)


def test_an_interrupt_while_the_finished_run_is_scored_is_not_lost(here: Path) -> None:
    def interrupt(event: Event) -> None:
        if event.type == "finished":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(lapclip.Interrupted, match="finished") as caught:
        of_scenes(name="late", callbacks=[interrupt])
    assert caught.value.run.state == "finished"


def losses_of(folder: Path) -> dict[int, float]:
    return {
        event["step"]: event["loss"]
        for event in read_events(folder / "events.jsonl")
        if event["type"] == "step"
    }


def test_data_in_memory_is_found_again_by_a_run_that_is_resumed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = wall_pairs(here / "walls")
    for image, _ in pairs:
        image.load()  # as in memory as can be

    def stop(event: Event) -> None:
        if event.type == "evaluation":
            raise lapclip.StopTraining("enough")

    whole = of_pairs(pairs, name="whole")
    tensors = [(torch.from_numpy(np.array(image)), captions) for image, captions in pairs]
    cut = of_pairs(tensors, name="cut", callbacks=[stop])
    assert cut.state == "stopped"
    assert cut.events[-1]["reason"] == "a callback: enough"
    assert cut.settings["data"]["source"] == whole.settings["data"]["source"], (
        "the same data is written once"
    )
    del pairs, tensors
    for path in (here / "walls").iterdir():
        path.unlink()
    (here / "moved").mkdir()
    (here / "runs").rename(here / "moved" / "runs")
    monkeypatch.chdir(here / "moved")
    cut = lapclip.open_run("cut")
    other = Path(cut.settings["data"]["source"]).with_name("other")
    other.mkdir()
    assert run_command("clean", "--caches", "--yes").returncode == 0
    assert not other.exists()
    lapclip.resume(cut, progress=False)  # what a run learnt from is there still
    assert losses("cut") == losses("whole") != {}
    (Path(cut.settings["data"]["source"]) / "captions.jsonl").write_text("")
    with pytest.raises(DataError):
        lapclip.evaluate(cut, progress=False)


def test_what_a_program_has_set_in_torch_neither_changes_a_run_nor_is_lost(
    here: Path, trained: Path
) -> None:
    def careless(event: Event) -> None:
        if isinstance(event, lapclip.events.Step) and getattr(event, "step", 0) == 3:
            torch.set_grad_enabled(False)
            torch.set_num_threads(2)
            torch.set_default_dtype(torch.float64)
            torch.set_float32_matmul_precision("medium")
            torch.set_autocast_enabled("cpu", True)
            torch.backends.cuda.enable_flash_sdp(False)

    torch.set_default_dtype(torch.float64)
    torch.backends.cuda.enable_flash_sdp(False)  # attention on the CPU takes another kernel then
    torch.set_float32_matmul_precision("medium")
    torch.set_default_device("meta")
    try:
        lapclip.load(trained).encode_image(
            Image.new("RGB", (40, 40))
        )  # what that keeps must not be float64
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            run = of_scenes(name="set", callbacks=[careless])
            assert torch.is_inference_mode_enabled()
            assert not torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            found = lapclip.evaluate(run, progress=False)
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_device().type == "meta"
        assert torch.get_float32_matmul_precision() == "medium"
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    plain = lapclip.open_run(trained)
    assert [row["loss"] for row in run.history] == [row["loss"] for row in plain.history]
    assert run.metrics == plain.metrics
    assert found.metrics["t2i_r1"] == run.metrics["t2i_r1"]


def test_an_interrupt_reaches_another_process_whole(trained: Path) -> None:
    interrupted = pickle.loads(pickle.dumps(lapclip.Interrupted(lapclip.open_run(trained), 3)))
    assert interrupted.run.path == trained
    assert interrupted.step == 3


def test_one_run_at_a_time_is_trained_in_a_process(here: Path) -> None:
    refused: list[Any] = []

    def second(event: Event) -> None:
        if event.type == "started":
            refused.append(in_thread(lambda: of_scenes(name="second")))
            raise lapclip.StopTraining

    run = of_scenes(name="first", callbacks=[second])
    assert run.state == "stopped"
    assert isinstance(refused[0], RunBusy)


@pytest.mark.parametrize(
    ("options", "kind", "why"),
    [
        ({"minutes": -1}, ConfigError, "minutes"),
        ({"recipe": "nothing"}, ConfigError, "nothing"),
        ({"settings": {"train.batch": 1}}, ConfigError, "unknown field"),
        ({"settings": {"batch_size": None}}, ConfigError, "not None"),
        ({"settings": {"batch_size": np.arange(3)}}, ConfigError, "whole number"),
        ({"settings": {"batch_size": object()}}, ConfigError, "whole number"),
        ({"settings": {3: 4}}, ConfigError, "named by a text"),
        ({"settings": ["train.batch_size=4"]}, ConfigError, "a dictionary"),
        ({"data": [], "settings": {"broken_share": "all"}}, ConfigError, "a number"),
        ({"data": "nowhere"}, DataError, "nowhere"),
        ({"data": []}, DataError, "no rows"),
        ({"start": "nowhere/at/all"}, RunError, "nowhere"),
        ({"ask": ["a|b"]}, ConfigError, "vertical bar"),
        ({"name": "a b"}, RunError, "a b"),
        ({"name": "a" * 300}, RunError, "at most 100"),
    ],
)
def test_what_the_command_refuses_is_an_error_of_ours(
    options: Any, kind: type, why: str, here: Path
) -> None:
    with warnings.catch_warnings(), pytest.raises(kind, match=why):
        lapclip.train(progress=False, **options)
    assert not list((here / "runs").glob("*/run.toml"))


def test_images_by_path_move_with_the_folder_around_their_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(event: Event) -> None:
        if getattr(event, "step", 0) == 2:
            raise lapclip.StopTraining

    (here / "before").mkdir()
    monkeypatch.chdir(here / "before")
    walls = photos(Path("walls"))
    pairs = [
        (path, path.with_suffix(".txt").read_text().splitlines())
        for path in sorted(walls.glob("*.png"))
    ]
    whole = of_pairs(pairs, name="whole")
    of_pairs(pairs, name="cut", callbacks=[stop])
    monkeypatch.chdir(here)
    (here / "before").rename(here / "after")
    monkeypatch.chdir(here / "after")
    assert lapclip.resume("cut", progress=False).settings["data"]["pictures"] == str(
        here / "after" / "walls"
    )
    assert losses("cut") == losses("whole") != {}
    assert not whole.path.exists()
    with pytest.raises(RunError, match="is not a run"):
        lapclip.open_run("walls")


def test_a_notebook_is_given_a_chart_of_plotly_and_a_table(trained: Path) -> None:
    run = lapclip.open_run(trained)
    shown = run.plot()._repr_mimebundle_()
    figure = shown["application/vnd.plotly.v1+json"]
    names = {trace["name"] for trace in figure["data"]}
    assert {"training batches", "text to image R@1", "chance, R@1"} <= names
    assert max(len(trace["x"]) for trace in figure["data"]) == 12  # a point for each step
    assert '"--' not in json.dumps(figure)  # colors that only our pages know
    assert "held-out batches" in shown["text/html"]
    assert "temperature" in run.plot("temperature")._repr_mimebundle_()["text/html"]
    with pytest.raises(ValueError, match="recall"):
        run.plot("nothing")
