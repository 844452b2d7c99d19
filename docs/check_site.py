"""Looks through the built site for dead links; Zensical's strict mode misses images and pages that only the menu names.

    python docs/check_site.py site

Every address in a page must be a file of the site and, with an anchor, a place in it. Nothing may be loaded from
elsewhere.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        self.links += [(tag, address) for name in ("href", "src") if (address := found.get(name))]


def faults(site: Path) -> list[str]:
    pages = {path: Page(path) for path in site.glob("*.html")}
    found = []
    # What is not found is answered with 404.html, whatever its path, so its links begin at the root.
    for path, page in pages.items():
        for tag, address in page.links if path.name != "404.html" else []:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                found += [f"{path.name}: {address} is loaded from elsewhere"] if tag != "a" else []
                continue
            target = site / unquote(parts.path) if parts.path not in ("", ".") else path
            if not target.exists():
                found.append(f"{path.name}: {address} leads nowhere")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{path.name}: {address} has no such place")
    return found if pages else [f"{site} has no pages"]


if __name__ == "__main__":
    dead = sorted(set(faults(Path(sys.argv[1]))))
    print("\n".join(dead) or "Every link of the site leads somewhere.")
    sys.exit(bool(dead))
