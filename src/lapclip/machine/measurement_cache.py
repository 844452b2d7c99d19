"""What was measured on this machine before, in the cache folder, so that it need not be measured again."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lapclip.paths import cache_folder, read_json, write_atomic


class CacheFile:
    """A JSON file of entries in the cache folder. A damaged one is ignored with a warning; one that cannot be written
    remembers nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def path(self) -> Path:
        return cache_folder() / self._name

    def read(self, key: str) -> Any:
        """What was written under the key, or None."""
        return self.entries().get(key)

    def write(self, key: str, value: Any) -> None:
        """Store a value beside the others."""
        self.replace({**self.entries(), key: value})

    def replace(self, entries: dict[str, Any]) -> None:
        """Store these entries alone. Other processes may read and write at the same time."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(entries, indent=1))

    def entries(self) -> dict[str, Any]:
        """Everything that is stored."""
        try:
            entries = read_json(self.path)
            if isinstance(entries, dict):
                return entries
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            pass
        print(f"{self.path} is damaged; what it remembered is measured again.", file=sys.stderr)
        return {}
