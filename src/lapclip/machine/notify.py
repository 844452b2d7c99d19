"""A word on the desktop, where there is one. No torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress

_BALLOON = (
    "Add-Type -AssemblyName System.Windows.Forms, System.Drawing;"
    "$icon = New-Object System.Windows.Forms.NotifyIcon;"
    "$icon.Icon = [System.Drawing.SystemIcons]::Information; $icon.Visible = $true;"
    "$icon.ShowBalloonTip(10000, $env:LAPCLIP_TITLE, $env:LAPCLIP_TEXT, 'Info'); Start-Sleep 10; $icon.Dispose()"
)


def notify(title: str, text: str) -> bool:
    """Show it and go on at once. False where there is no desktop, or none that can be asked."""
    found = notice_command(title, text)
    if found is None:
        return False
    command, words = found
    quiet = subprocess.DEVNULL
    with suppress(OSError):
        subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env={**os.environ, **words})
        return True
    return False


def notice_command(title: str, text: str) -> tuple[list[str], dict[str, str]] | None:
    """The command, and what it reads from its environment: words never become part of a script."""
    if sys.platform == "darwin" and shutil.which("osascript"):
        script = 'display notification (system attribute "LAPCLIP_TEXT") with title (system attribute "LAPCLIP_TITLE")'
        return ["osascript", "-e", script], {"LAPCLIP_TITLE": title, "LAPCLIP_TEXT": text}
    if sys.platform == "win32" and (shell := shutil.which("powershell")):
        return [shell, "-NoProfile", "-Command", _BALLOON], {"LAPCLIP_TITLE": title, "LAPCLIP_TEXT": text}
    if sys.platform == "linux" and shutil.which("notify-send"):
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            return ["notify-send", "--app-name=lapclip", "--", title, text], {}
    return None
