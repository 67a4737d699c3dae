#!/usr/bin/env python3
"""Look at the documentation site in a headless Chromium, as readers with wide and narrow screens do.

    python .ci/site.py docs/_build/html             # every page
    python .ci/site.py docs/_build/html index prec  # those whose names begin so; links and search of all

It needs Chromium (Debian's package `chromium`) and, of pip, `playwright` and `axe-playwright-python`, which contains
axe-core. Every guide is opened at each width of `WIDTHS`, and so is one in `NAMES_FOR_EACH_READ` of the pages of names,
which one template makes; the others of these are opened at the narrow width. Each finding is printed with its page:

- the page, or a part of it, scrolls sideways; code may, on a narrow screen a table, and those of `WIDE_TABLES`;
- a page is longer than `MAX_HEIGHT`, or one of `LONG_PAGES` is not, and so need not be listed there any more;
- a link to a page or an anchor of the site leads nowhere;
- a picture has no alternative text;
- axe-core finds too little contrast, in the light and in the dark theme, or something that the keyboard cannot reach;
  it reads what is opened at the wide width;
- the search does not find the pages that `SEARCHES` expects.
"""

from __future__ import annotations

import functools
import http.server
import itertools
import shutil
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import axe_playwright_python
from playwright.sync_api import Browser, Page, sync_playwright

NAMES_FOR_EACH_READ = 8  # that is opened wide, too, and read by axe-core, which takes longer than all else
BROWSERS = 2  # that look at pages at the same time, each of which keeps about one core busy
WIDTHS = (1400, 390)
MAX_HEIGHT = 8000
# Beginnings of names: indexes, in which readers look one thing up, and reference pages.
ANY_HEIGHT = ("api/", "errors", "parity", "genindex", "py-modindex")
# Guides that are yet to be divided; a page leaves this list when it is short enough, and none is added to it.
LONG_PAGES: tuple[str, ...] = ()

WIDE_TABLES = ("performance",)  # beginnings of names: pages whose tables have a column for each kind of kernel

SEARCHES = {  # ten words of a reader's, and a page that the search must find for each
    "autocast": "precision_control.html",
    "checkpoint": "checkpoints.html",
    "einsum": "own_modules.html",
    "pipeline": "pipeline.html",
    "Kubernetes": "clusters.html",
    "MFU": "metrics.html",
    "recompute": "recompute.html",
    "experts": "experts.html",
    "Hopper": "precision.html",
    "cuDNN": "install.html",
}

# axe-core's rules of contrast (WCAG's level AA), of what the keyboard must reach, and of what has no name to read out.
AXE_RULES = ["color-contrast", "link-in-text-block", "scrollable-region-focusable", "tabindex"]
AXE_RULES += ["accesskeys", "bypass", "skip-link", "nested-interactive", "link-name", "button-name", "image-alt"]

# Elements that a reader would have to move sideways, but for code, and for tables where they may: Furo wraps them.
SCROLLS_SIDEWAYS = """tablesMay => {
    const found = [];
    const mayScroll = "pre, .highlight, .sig" + (tablesMay ? ", .table-wrapper" : "");
    const root = document.documentElement;
    if (root.scrollWidth > window.innerWidth) found.push(`the page, ${root.scrollWidth} pixels wide`);
    for (const element of document.querySelectorAll("main *, article *")) {
        const scrolls = ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
        const free = element.closest(mayScroll);
        if (scrolls && !free && element.scrollWidth > element.clientWidth + 1)
            found.push(`<${element.tagName.toLowerCase()} class="${element.className}">`);
    }
    return found;
}"""

# Of one rule and page a few places tell enough.
RUN_AXE = """async rules => {
    const {violations} = await axe.run(document, {runOnly: {type: "rule", values: rules}, resultTypes: ["violations"]});
    return violations.flatMap(v => v.nodes.slice(0, 3).map(n => `${v.id}: ${n.target.join(" ")} ${
        (n.any[0] || n.all[0] || n.none[0] || {message: ""}).message}`));
}"""


class References(HTMLParser):
    """Anchors, links and pictures of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.pictures: list[tuple[str, str]] = []  # address, alternative text
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "a" and (target := values.get("href")):
            self.links.append(target)
        if tag == "img":
            self.pictures.append((values.get("src") or "", (values.get("alt") or "").strip()))


def pages_of(site: Path) -> list[str]:
    """Return the names of the site's pages, without those of Sphinx's own files."""
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    return [name for name in names if not name.startswith(("_static/", "_modules/"))]


def check_references(site: Path) -> Iterator[str]:
    """Yield links that lead nowhere, and pictures without a text."""
    read = functools.cache(References)
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if name.startswith("_static/"):
            continue
        page = read(path)
        for source, text in page.pictures:
            # Sphinx gives a picture without a text its address as the text.
            if not text or text.endswith((".svg", ".png")):
                yield f"{name}: the picture {source} has no alternative text"
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            anchor = urllib.parse.unquote(parts.fragment)
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{name}: no page {link}"
            elif anchor and target.suffix == ".html" and anchor not in read(target).anchors:
                yield f"{name}: no anchor {link}"


def check_layout(page: Page, name: str, width: int) -> Iterator[str]:
    """Yield what scrolls sideways, and a length that is not allowed, of the page that is open."""
    tables_may = width < max(WIDTHS) or name.startswith(WIDE_TABLES)
    for place in page.evaluate(SCROLLS_SIDEWAYS, tables_may):
        yield f"{name} at {width}: scrolls sideways: {place}"
    height = page.evaluate("document.documentElement.scrollHeight")
    if not name.startswith(ANY_HEIGHT):
        listed = name.removesuffix(".html") in LONG_PAGES
        if height > MAX_HEIGHT and not listed:
            yield f"{name} at {width}: {height} pixels long, more than {MAX_HEIGHT}"
        if height <= MAX_HEIGHT and listed and width == min(WIDTHS):
            yield f"{name}: is short enough, at {height} pixels; take it from LONG_PAGES"


def check_access(page: Page, name: str) -> Iterator[str]:
    """Yield axe-core's findings in the page that is open, in both themes."""
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        found = page.evaluate(RUN_AXE, AXE_RULES)
        yield from (f"{name}, {theme}: {finding}" for finding in found)
    page.emulate_media(color_scheme="light")


def check_pages(browser: Browser, address: str, names: list[str]) -> Iterator[str]:
    """Yield the findings of these pages at every width."""
    axe = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    of_names = [name for name in names if name.startswith("api/")]
    only_narrow = {*of_names} - {*of_names[::NAMES_FOR_EACH_READ]}
    for width in WIDTHS:
        page = browser.new_page(viewport={"width": width, "height": 900}, reduced_motion="reduce")
        for name in names:
            if width > min(WIDTHS) and name in only_narrow:
                continue
            page.goto(f"{address}/{name}", wait_until="load")
            yield from check_layout(page, name, width)
            if width == max(WIDTHS):
                page.evaluate(axe)
                yield from check_access(page, name)
        page.close()


def check_search(browser: Browser, address: str) -> Iterator[str]:
    """Yield the words for which the search does not find the page that it should."""
    page = browser.new_page()
    for word, expected in SEARCHES.items():
        page.goto(f"{address}/search.html?q={urllib.parse.quote(word)}")
        page.wait_for_selector("#search-results .search-summary:not(:empty)")
        page.wait_for_function("!document.querySelector('#search-results h2').textContent.startsWith('Searching')")
        links = page.eval_on_selector_all("#search-results li a", "all => all.map(a => a.getAttribute('href'))")
        if not any(link.split("?")[0].split("#")[0] == expected for link in links):
            yield f"the search for {word} does not find {expected}"


class QuietServer(http.server.ThreadingHTTPServer):
    """Server that does not report connections which a browser closes, since it goes to the next page."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Handler of requests that logs none."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def in_browser(check: Callable[..., Iterator[str]], chromium: str, *arguments: object) -> list[str]:
    """Return the findings of a check, which runs with a browser of its own: Playwright's are of one thread."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])  # root has no sandbox
        findings = list(check(browser, *arguments))
        browser.close()
    return findings


def main(site: Path, *beginnings: str) -> int:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("no Chromium on PATH: apt-get install chromium", file=sys.stderr)
        return 1
    handler = functools.partial(QuietHandler, directory=str(site))
    names = [name for name in pages_of(site) if name.startswith(beginnings or "")]
    with QuietServer(("127.0.0.1", 0), handler) as server, ThreadPoolExecutor(BROWSERS + 1) as pool:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        # Every second page for each of two browsers, since neighbours, such as those of api/, take about as long.
        looks = [(check_pages, chromium, address, names[first::BROWSERS]) for first in range(BROWSERS)]
        looks.append((check_search, chromium, address))
        futures = [pool.submit(in_browser, *look) for look in looks]
        count = 0
        for finding in itertools.chain(check_references(site), *(future.result() for future in futures)):
            print(finding, flush=True)
            count += 1
        server.shutdown()
    print(f"{len(names)} pages, {count} findings")
    return 1 if count else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
