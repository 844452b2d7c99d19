"""What was measured on this machine before, kept in the cache folder so that it need not be measured again."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lapclip.paths import cache_folder


class Notebook:
    """A JSON file of keys and values. A damaged one is ignored with a warning; if it cannot be written, so be it."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def path(self) -> Path:
        return cache_folder() / self._name

    def read(self, key: str) -> Any:
        """What was written under the key, or None."""
        return self.pages().get(key)

    def write(self, key: str, value: Any) -> None:
        """Keep a value beside the others."""
        self.replace({**self.pages(), key: value})

    def replace(self, pages: dict[str, Any]) -> None:
        """Other processes may read and write at the same time, so the file is replaced as a whole."""
        partial = self.path.with_name(f".{self._name}.{os.getpid()}.partial")
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(pages, indent=1), encoding="utf-8")
            os.replace(partial, self.path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def pages(self) -> dict[str, Any]:
        try:
            pages = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(pages, dict):
                return pages
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            pass
        print(f"{self.path} is damaged; what it remembered is measured again.", file=sys.stderr)
        return {}
