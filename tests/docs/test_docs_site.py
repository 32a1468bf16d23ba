# SPDX-License-Identifier: Apache-2.0
"""The built site: strict, complete, without broken links or anything loaded from elsewhere; and in a browser."""

from __future__ import annotations

import functools
import http.server
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
from browser import Visit, chromium
from pages import REPOSITORY, hooks

import evoalign
from evoalign.config import from_dict
from evoalign.config.schema import docstrings, more

pytest.importorskip("material", reason="the site needs the dependency group docs")

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


class Page(HTMLParser):
    """Ids, links and what a page loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and "href" in given and given.get("rel") != "canonical":
            self.loads.append(given["href"])


@pytest.fixture(scope="session")
def parsed(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}


def test_links_lead_to_pages_and_anchors_of_the_site(site: Path, parsed: dict[Path, Page]) -> None:
    assert len(parsed) > 15
    for file, page in parsed.items():
        for link in page.links:
            if link.startswith(("https://", "http://")):
                assert link.startswith("https://squidfunk.github.io"), f"{file.relative_to(site)} links {link}"
                continue
            address, anchor = urldefrag(link)
            target = (file.parent / unquote(address)).resolve() if address else file
            target = target / "index.html" if target.is_dir() else target
            if target.suffix == ".csv":  # the data of a page
                assert target.is_file() and not anchor, f"{file.relative_to(site)} links {link}"
                continue
            assert target in parsed, f"{file.relative_to(site)} links {link}"
            assert not anchor or unquote(anchor) in parsed[target].ids, f"{file.relative_to(site)} links {link}"
        for address in page.loads:
            assert "//" not in address, f"{file.relative_to(site)} loads {address}"
            assert (file.parent / unquote(urldefrag(address)[0])).is_file(), f"{file.name} loads {address}"


def test_reference_has_every_setting_with_type_and_description(site: Path) -> None:
    text = (site / "reference/configuration.html").read_text(encoding="utf-8")
    keys = leaves(from_dict({"es": {"sigma": 1.0}, "stopping": {"max_hours": 1}}).model_dump())
    assert len(keys) > 60
    for key in keys:
        entry = re.search(rf'id="{re.escape(key)}">.*?</dt>\s*<dd>(.*?)</dd>', text, re.DOTALL)
        assert entry, f"no description of {key}"
        kind, meaning = re.findall(r"<p>(.*?)</p>", entry[1], re.DOTALL)
        assert "default" in kind and len(meaning) > 5, f"{key}: {entry[1]}"
    known = {f"{s['section']}.{s['key'].rsplit('.', 1)[-1]}" for s in hooks.settings()}
    assert set(more()) <= known - set(docstrings())


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    return [
        leaf
        for name, value in tree.items()
        for leaf in (leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name])
    ]


def test_reference_has_every_command_option_and_public_name(site: Path, parsed: dict[Path, Page]) -> None:
    file = site / "reference/commands.html"
    text = file.read_text(encoding="utf-8")
    for path, command in hooks.commands():
        part = text.split(f'id="{path.replace(" ", "-")}"', 1)[1].split("<h3", 1)[0]
        for parameter in command.params:
            argument = parameter.metavar or parameter.name.upper()
            shown = parameter.opts[-1] if parameter.param_type_name == "option" else argument
            assert (shown in part) is not parameter.hidden, f"{path}: {shown}"
    assert set(evoalign.__all__) - {"__version__"} <= parsed[file].ids
    assert {f"base-{name}" for name in hooks.BASES} <= parsed[file].ids


# In a browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """The site on the loopback address."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")  # it runs an event loop, which no other module may meet
def browser() -> Iterator[Any]:
    """Headless Chromium, the one that is installed."""
    with chromium() as started:
        yield started


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Makes tabs and closes them."""
    made: list[Visit] = []

    def make(**settings: Any) -> Visit:
        made.append(Visit(browser, **settings))
        return made[-1]

    yield make
    for tab in made:
        tab.context.close()


@pytest.mark.slow
@pytest.mark.last("dark")
@pytest.mark.parametrize(("scheme", "name"), [("light", "default"), ("dark", "slate")])
def test_every_page_renders(visit: Any, site: Path, address: str, scheme: str, name: str) -> None:
    tab = visit(viewport=DESKTOP, color_scheme=scheme)
    for file in sorted(site.rglob("*.html")):
        tab.page.goto(f"{address}/{file.relative_to(site)}")
        assert tab.page.locator("article h1").first.is_visible(), file.name
        assert tab.page.evaluate("document.body.dataset.mdColorScheme") == name
        for size in (PHONE, DESKTOP):
            tab.page.set_viewport_size(size)
            wide = "document.documentElement.scrollWidth"
            end = time.monotonic() + 5
            while tab.page.evaluate(wide) > size["width"] and time.monotonic() < end:
                tab.page.wait_for_timeout(50)  # the sidebar may still be on its way in or out
            assert tab.page.evaluate(wide) <= size["width"], f"{file.name} is {tab.page.evaluate(wide)} wide"
    assert not tab.errors
    assert all(url.startswith((address, "data:", "blob:")) for url in tab.asked)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["server", "file"])
def test_search_works_offline(visit: Any, site: Path, address: str, way: str) -> None:
    tab = visit(viewport=DESKTOP)
    tab.page.goto(f"{address}/index.html" if way == "server" else (site / "index.html").as_uri())
    tab.page.locator("label.md-search__icon, input.md-search__input").first.click()
    tab.page.keyboard.type("zscore")
    found = tab.page.locator(".md-search-result__item a[href*='concepts.html']")
    found.first.wait_for(state="attached", timeout=20_000)  # results change while the word is typed
    assert not tab.errors
    allowed = (address, "data:", "blob:", site.as_uri())
    assert all(url.startswith(allowed) for url in tab.asked)


@pytest.mark.slow
def test_palette_can_be_switched_and_code_copied(visit: Any, address: str) -> None:
    tab = visit(viewport=DESKTOP, color_scheme="light")
    tab.page.goto(f"{address}/quickstart.html")
    assert tab.page.locator("pre button, .md-code__button").count() >= 5
    tab.page.locator("form.md-header__option label:visible").first.click()
    assert tab.page.evaluate("document.body.dataset.mdColorScheme") == "slate"
