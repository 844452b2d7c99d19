"""Make the README's images of `lapclip watch` and `lapclip search --web` from a finished run of this folder.

    lapclip train --name first-run --ask "a red cat in the snow" --ask "three blue houses at night"
    python docs/screenshots.py first-run

Needs playwright and a chromium. Writes docs/watch.png (the page), docs/watch-terminal.png, and docs/search.png (the
page, with drawn scenes).
"""

from __future__ import annotations

import io
import json
import os
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


def page(name: str, browser: Browser) -> None:
    """The top of the page, as wide as a laptop's window."""
    command = [sys.executable, "-m", "lapclip", "watch", name, "--web", "--port", str(PORT), "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
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
            Image.fromarray(draw(scene, 360, number)).save(folder / f"{describe(scene, Random(number))} {number}.jpg")
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
            shown.keyboard.type("two red flowers in the middle, at sunset")
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
    watching = WatchedRuns([name], wait=False)
    watching.refresh()
    console = Console(record=True, width=100, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(screen.draw(watching.views, 0, Canvas.of(console, 100), lambda command: f"lapclip {command}"))
    shown = browser.new_page(viewport={"width": 1240, "height": 900})
    shown.set_content(console.export_svg(title=f"lapclip watch {name}"))
    shown.locator("svg").screenshot(path=DOCS / "watch-terminal.png", omit_background=True)


if __name__ == "__main__":
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page(sys.argv[1], chromium)
        terminal(sys.argv[1], chromium)
        search(sys.argv[1], chromium)
        chromium.close()
