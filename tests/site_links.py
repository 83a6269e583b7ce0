"""Checks every internal link and anchor of the built documentation: ``python tests/site_links.py docs/_build``."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and where it can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        self.links += [value for name in ("href", "src") if (value := given.get(name))]


def broken_links(site: Path) -> tuple[list[str], int]:
    """The links of a built site that lead nowhere, and how many were looked at."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    broken, count = [], 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            missing = not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors)
            if missing:
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    return broken, count


if __name__ == "__main__":
    found, looked_at = broken_links(Path(sys.argv[1]))
    print(*found, f"{looked_at} internal links, {len(found)} broken", sep="\n")
    sys.exit(bool(found) or looked_at < 100)
