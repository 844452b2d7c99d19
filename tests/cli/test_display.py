from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console

from lapclip.cli.display import Display
from lapclip.runs import events


def step(number: int) -> events.Step:
    return events.Step(
        step=number, epoch=1, loss=2.5, t2i_accuracy=0.25, i2t_accuracy=0.75, logit_scale=2.66, temperature=0.07,
        lr=1e-3, grad_norm=1.0, grad_norms={}, seconds=None,
    )  # fmt: skip


def shown_after_resuming(*then: events.Event, skipped: Sequence[str] = ()) -> str:
    """The screen of a run that goes on after step 3, takes four steps, and meets some events."""
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=160, highlight=False))
    resumed = events.Resumed(
        step=3, steps=1200, batch_size=16, checkpoint="step-00000003", skipped=list(skipped)
    )
    for event in (resumed, *map(step, range(4, 8)), *then):
        display(event)
    return screen.getvalue()


def test_a_terminal_shows_loss_accuracy_rate_and_time_left() -> None:
    shown = shown_after_resuming(events.Stopped(step=7, reason="SIGINT"), skipped=["step-9: short"])
    for words in ("after step 3 of 1,200", "step-9: short", "7/1,200", "loss 2.500", "accuracy 50%",
                  "pairs/s", "left"):  # fmt: skip
        assert words in shown, words


def test_the_rate_after_a_resume_counts_the_steps_since_then() -> None:
    """A step is recorded one step late, but at once before an evaluation: two events may come together."""
    screen, now = io.StringIO(), 100.0
    display = Display(
        Console(file=screen, force_terminal=True, width=160, highlight=False), lambda: now
    )
    display(
        events.Resumed(step=10, steps=40, batch_size=300, checkpoint="step-00000010", skipped=[])
    )
    now = 103.0
    display(step(11))
    now = 103.001
    display(step(12))
    display(events.Stopped(step=12, reason="SIGINT"))
    shown = screen.getvalue()
    assert "200 pairs/s  42 s left" in shown
    assert max(int(rate.replace(",", "")) for rate in re.findall(r"([\d,]+) pairs/s", shown)) == 200


def test_a_fallback_is_said_above_the_bar_and_the_bar_goes_back() -> None:
    text = "cuda failed at step 8 (CUDA error: unknown); the CPU takes over; going on after step 3"
    places = {"image": "cpu", "text": "cpu"}
    fell_back = events.FellBack(
        step=3, cause="device error", change={"device": "cpu"}, devices=places, text=text
    )
    shown = shown_after_resuming(fell_back, step(4), events.Stopped(step=4, reason="SIGINT"))
    assert text in shown
    assert "4/1,200" in shown[shown.index(text) :]


def test_images_being_drawn_have_a_bar_of_their_own() -> None:
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=80))
    for done in (1, 50, 100):
        display.data_progress(done, 100)
    display.close()
    assert "drawing images" in screen.getvalue()


def test_what_is_done_to_images_is_said_by_its_name(capsys) -> None:
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=80))
    for what in ("packing", "looking at"):
        for done in (1, 50):
            display.data_progress(done, 100, what)
    display.close()
    assert "packing images" in screen.getvalue()
    assert "looking at images" in screen.getvalue()
    plain = Display(Console(file=screen, force_terminal=False))
    for total, what in (
        (7000, "packing"),
        (7000, "packing"),
        (90, "packing"),
        (90, "the teacher embeds images"),
    ):
        plain.data_progress(50, total, what)
    said = capsys.readouterr().err.splitlines()
    assert said == ["packing images: 7,000", "packing images: 90", "the teacher embeds images: 90"]


def test_what_is_counted_has_a_bar_or_a_line_now_and_then(capsys) -> None:
    screen = io.StringIO()
    for terminal in (True, False):
        display = Display(Console(file=screen, force_terminal=terminal, width=80))
        tell = display.counting("looking at images")
        for done in (512, 1024, 1500):
            tell(done, 1500)
        display.close()
    assert "looking at images" in screen.getvalue()
    assert (
        "all 1,500 done; computing" in screen.getvalue()
    )  # a terminal is never left without a sign of life
    assert "1,500/1,500" in screen.getvalue()
    assert capsys.readouterr().err == "looking at images: 512 of 1,500\n"


def test_captions_and_names_are_text_and_never_markup() -> None:
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=100, highlight=False))
    display(
        events.Resumed(step=3, steps=9, batch_size=2, checkpoint="x", skipped=["[red]odd[/red]"])
    )
    display.close()
    assert "[red]odd[/red]" in screen.getvalue()
