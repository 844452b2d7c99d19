"""Make the images of `lapclip watch` and `lapclip search --web` in the README and in docs/.

    python docs/screenshots.py first-run

trains `first-run` in this folder, which takes some minutes, and writes docs/learning.webp, the page of `watch` while
the run learns. Of the finished run it then writes docs/watch.png (the page), docs/watch-terminal.png, and
docs/search.png (the page, with drawn scenes). A finished run of that name is not trained again, and then there is
no new docs/learning.webp. Needs playwright and a chromium.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console

from lapclip.data.scenes import describe, split_scenes
from lapclip.data.scenes.drawing import draw
from lapclip.watch import screen
from lapclip.watch.panels import Canvas
from lapclip.watch.terminal import WatchedRuns

DOCS = Path(__file__).parent
PORT = 8791
ASKED = ["a red cat in the snow", "three blue houses at night"]
FRAMES, FRAME_MS = 30, 400
"""How many images of a whole run are shown, and for how long each."""


def learning(name: str, browser: Browser) -> None:
    """The page while a run learns, from its first step to its end."""
    # Scored after every epoch, so that there is something to see early on.
    settings = [
        "--set",
        "train.evaluate_every_epochs=1",
        *(f"--ask={caption}" for caption in ASKED),
    ]
    train = [sys.executable, "-m", "lapclip", "train", "--name", name, *settings]
    run = subprocess.Popen(train, stdout=subprocess.DEVNULL)
    server = subprocess.Popen(watch_command(name), stdout=subprocess.PIPE)
    try:
        shown = browser.new_page(viewport={"width": 1180, "height": 960}, color_scheme="light")
        shown.goto(address_of(server))
        taken = []
        while run.poll() is None:
            shown.wait_for_timeout(1000)
            if shown.get_by_text(re.compile(r"^Step \d")).filter(visible=True).count():
                taken.append(shown.screenshot())
        shown.wait_for_timeout(3000)
        taken.append(shown.screenshot())
    finally:
        run.terminate()
        server.terminate()
        server.wait()
    chosen = [taken[round(at * (len(taken) - 1) / (FRAMES - 1))] for at in range(FRAMES)]
    frames = [
        Image.open(io.BytesIO(one)).convert("RGB").resize((885, 720), Image.Resampling.LANCZOS)
        for one in chosen
    ]
    times = [FRAME_MS] * (FRAMES - 1) + [10 * FRAME_MS]
    frames[0].save(
        DOCS / "learning.webp",
        save_all=True,
        append_images=frames[1:],
        duration=times,
        loop=0,
        quality=70,
        method=6,
    )


def watch_command(name: str) -> list[str]:
    return [sys.executable, "-m", "lapclip", "watch", name, "--web", "--port", str(PORT), "--json"]


def page(name: str, browser: Browser) -> None:
    """The top of the page, as wide as a laptop's window."""
    server = subprocess.Popen(watch_command(name), stdout=subprocess.PIPE)
    try:
        shown = browser.new_page(viewport={"width": 1180, "height": 1130}, color_scheme="light")
        shown.goto(address_of(server))
        shown.wait_for_timeout(3000)
        shown.screenshot(path=DOCS / "watch.png")
    finally:
        server.terminate()
        server.wait()


def address_of(server: subprocess.Popen) -> str:
    """Where a page is, with its token; it listens before it says so."""
    assert server.stdout
    return json.loads(server.stdout.readline())["url"]


def search(name: str, browser: Browser) -> None:
    """The page of images, after a question was typed."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "pictures"
        folder.mkdir()
        for number, scene in enumerate(split_scenes(600, seed=2)["train"]):
            Image.fromarray(draw(scene, 360, number)).save(
                folder / f"{describe(scene, Random(number))} {number}.jpg"
            )
        command = [
            sys.executable,
            "-m",
            "lapclip",
            "search",
            str(folder),
            "--model",
            name,
            "--web",
            "--port",
            str(PORT),
            "--json",
        ]
        environment = {**os.environ, "LAPCLIP_DATA": place}
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            shown = browser.new_page(viewport={"width": 1180, "height": 800}, color_scheme="light")
            shown.goto(address_of(server))
            shown.get_by_role("button", name="Understood").click()
            shown.mouse.move(0, 0)
            shown.keyboard.type("flowers at sunset")
            shown.wait_for_timeout(3000)
            # In 256 colours: many small images would make a large file.
            Image.open(io.BytesIO(shown.screenshot())).convert("RGB").quantize(256).save(
                DOCS / "search.png", optimize=True
            )
        finally:
            server.terminate()
            server.wait()


def terminal(name: str, browser: Browser) -> None:
    """The whole image in a window of 100 columns."""
    watching = WatchedRuns([name])
    watching.refresh()
    console = Console(
        record=True, width=100, force_terminal=True, color_system="truecolor", file=io.StringIO()
    )
    console.print(
        screen.draw(
            watching.views, 0, Canvas.of(console, 100), lambda command: f"lapclip {command}"
        )
    )
    shown = browser.new_page(viewport={"width": 1240, "height": 900})
    shown.set_content(console.export_svg(title=f"lapclip watch {name}"))
    shown.locator("svg").screenshot(path=DOCS / "watch-terminal.png", omit_background=True)


if __name__ == "__main__":
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        if not Path("runs", sys.argv[1]).exists():
            learning(sys.argv[1], chromium)
        page(sys.argv[1], chromium)
        terminal(sys.argv[1], chromium)
        search(sys.argv[1], chromium)
        chromium.close()
