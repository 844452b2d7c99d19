"""Make the README's pictures of `lapclip watch` from a finished run of this folder.

    lapclip train --name first-run --ask "a red cat in the snow" --ask "three blue houses at night"
    python docs/screenshots.py first-run

Needs playwright and a chromium. Writes docs/watch.png (the page) and docs/watch-terminal.png.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from rich.console import Console

from lapclip.watch.screen import Pens, picture
from lapclip.watch.watched import Watching

DOCS = Path(__file__).parent
PORT = 8791


def page(name: str, browser: Browser) -> None:
    """The top of the page, as wide as a laptop's window."""
    command = [sys.executable, "-m", "lapclip", "watch", name, "--web", "--port", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout
        server.stdout.readline()  # it listens before it says where
        shown = browser.new_page(viewport={"width": 1180, "height": 1130}, color_scheme="light")
        shown.goto(f"http://127.0.0.1:{PORT}/")
        shown.wait_for_timeout(3000)
        shown.screenshot(path=DOCS / "watch.png")
    finally:
        server.terminate()
        server.wait()


def terminal(name: str, browser: Browser) -> None:
    """The whole picture in a window of 100 columns."""
    watching = Watching([name], wait=False)
    watching.refresh()
    console = Console(record=True, width=100, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(picture(watching.looks, 0, 100, 2, Pens.of(console), lambda command: f"lapclip {command}"))
    shown = browser.new_page(viewport={"width": 1240, "height": 900})
    shown.set_content(console.export_svg(title=f"lapclip watch {name}"))
    shown.locator("svg").screenshot(path=DOCS / "watch-terminal.png", omit_background=True)


if __name__ == "__main__":
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page(sys.argv[1], chromium)
        terminal(sys.argv[1], chromium)
        chromium.close()
