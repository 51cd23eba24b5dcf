"""The site of docs/: it builds, loads nothing from elsewhere, finds what people type, and cuts nothing off."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import anabranch
from tests.pages import DOCS, ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.long

_LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(https?://|//)", re.I
)
# What people type, and the pages of which one must be among the first results.
SEARCHES = [
    ("FastAPI", ["how-to/web-service/"]),
    ("pytest", ["testing/"]),
    ("asyncio", ["asyncio/", "reference/asyncio/"]),
    ("exactly once", ["reliability/", "processing/", "client/"]),
    ("exactly-once", ["reliability/", "processing/", "client/"]),
    ("outbox", ["ledger/", "how-to/coming-from/"]),
    ("create_stream", ["reference/streams/", "client/"]),
    ("OutcomeUnknown", ["reference/errors/", "client/"]),
    ("ANABRANCH_CONFIG", ["configuration/"]),
]  # fmt: skip
_FIRST = 5


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[Page]:
    """A page of a browser, with the site."""
    from playwright.sync_api import sync_playwright

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as started:
        path = shutil.which("chromium")
        assert path, (
            "Debian's chromium is missing: apt-get install chromium (scripts/setup does it)"
        )
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        with browser.new_context(base_url=f"http://127.0.0.1:{server.server_port}") as context:
            opened = context.new_page()
            opened.set_default_timeout(30_000)
            yield opened
        browser.close()
    server.shutdown()
    server.server_close()


def test_it_loads_nothing_from_elsewhere_and_has_all_pages(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert [name for name, text in pages.items() if _LOADED.search(text)] == []
    assert "receipts=[writer.finish()]" in re.sub("<[^>]+>", "", pages["index.html"])
    for path in DOCS.glob("*.md"):
        assert path.stem in ("index",) or f"{path.stem}/index.html" in pages, path
    assert 'id="anabranchcore"' in pages["inside/house/index.html"]
    assert "FINALIZE_IN_PROGRESS --&gt; COMMITTED" in pages["inside/states/index.html"]
    assert "<td>answer before the commit</td>" in pages["inside/mutants/index.html"]


def test_the_reference_has_each_public_name_once(site: Path) -> None:
    pages = (site / "reference").rglob("*.html")
    found = Counter(
        name
        for path in pages
        for name in re.findall(r' id="(anabranch\.[\w.]+)"', path.read_text())
    )
    for name in anabranch.__all__:
        if not isinstance(
            getattr(anabranch, name), ModuleType
        ):  # a module has a heading of the page
            assert {f"anabranch.{name}", f"anabranch.types.{name}"} & found.keys(), name
    for name in (
        "Client.begin",
        "Transaction.commit",
        "Writer.finish",
        "errors.OutcomeUnknown",
        "types.Event",
    ):
        assert found[f"anabranch.{name}"] == 1, name


@pytest.mark.parametrize(("typed", "wanted"), SEARCHES, ids=[typed for typed, _ in SEARCHES])
def test_the_search_finds_what_people_type(page: Page, typed: str, wanted: list[str]) -> None:
    page.goto("/")
    page.keyboard.press("/")
    page.fill("input.md-search__input", typed)
    page.wait_for_selector(".md-search-result__item a")
    page.wait_for_timeout(300)  # the list is replaced while the index loads
    links = page.eval_on_selector_all(
        ".md-search-result__item > a", "found => found.map(each => new URL(each.href).pathname)"
    )
    first = [link.lstrip("/") for link in links[:_FIRST]]
    assert set(first) & set(wanted), first


@pytest.mark.parametrize("width", [1280, 1920, 400])
def test_no_signature_is_cut_off(page: Page, width: int) -> None:
    """Lines of signatures fit in the page, or their block says by a bar that it scrolls."""
    page.set_viewport_size({"width": width, "height": 900})
    for path in sorted((DOCS / "reference").glob("*.md")):
        name = "" if path.stem == "index" else f"{path.stem}/"
        page.goto(f"/reference/{name}")
        cut = page.eval_on_selector_all(
            ".doc-signature pre code, .doc-signature code",
            """blocks => blocks.filter(one => one.scrollWidth > one.clientWidth + 1)
                               .map(one => one.textContent.trim().slice(0, 80))""",
        )
        assert cut == [], f"{path.stem} at {width}"
