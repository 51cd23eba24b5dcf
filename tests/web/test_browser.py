"""The pages in Debian's Chromium, as people use them: looked at, clicked through, by keyboard, by axe.

``ANABRANCH_PICTURES=DIR`` keeps a picture of each page, light and dark, to be looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import anabranch
from anabranch.protocol.ids import txn_text
from tests.web.conftest import WebProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.broker
NAME = "<b onclick=alert(1)>7</b> & 'co'"
# In the dark, colours alone are others.
AXE: dict[str, dict[str, object]] = {"light": {}, "dark": {"runOnly": ["color-contrast"]}}
PAGES = ("", "streams", "streams/{scope}/s", "transactions", "transactions/{txn}", "groups", "controllers",
         "streams/{scope}/s/delete", "transactions/{txn}/abort", "nope")  # fmt: skip


@pytest.fixture
def page(browser: Browser, web: WebProcess) -> Iterator[Page]:
    """A page; nothing may be said on its console, but of the status of pages that are not there."""
    with browser.new_context(base_url=web.url) as context:
        opened = context.new_page()
        opened.set_default_timeout(20_000)
        said: list[str] = []
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        yield opened
        assert [text for text in said if not re.search("status of (40|503)", text)] == []


@pytest.fixture
def scope(client: anabranch.Client, unique: str) -> str:
    """A scope with a stream, a group, and history."""
    client.create_stream(f"{unique}/s", segments=2)
    with client.begin(unique) as txn:
        txn.write(f"{unique}/s", b"v", key=b"k")
        txn.commit()
    with client.read(f"{unique}/s", f"{unique}-group", timeout=10) as events:
        next(iter(events))
    return unique


@pytest.fixture
def txn(client: anabranch.Client, scope: str) -> Iterator[bytes]:
    """The id of an open transaction with a name that HTML would take for its own."""
    with client.begin(scope, name=NAME, keepalive=600) as begun:
        begun.write(f"{scope}/s", b"v", key=b"k")
        begun.flush()
        assert begun.txn_id is not None
        yield begun.txn_id
        if client.state(begun.txn_id).state == "OPEN":
            begun.abort()


@pytest.mark.parametrize(
    ("scheme", "pages"),
    [
        pytest.param("light", PAGES, id="light", marks=pytest.mark.long),
        pytest.param("dark", PAGES, id="dark", marks=pytest.mark.soak),
    ],
)
def test_every_page_is_fit_for_all(
    browser: Browser, web: WebProcess, scope: str, txn: bytes, scheme: str, pages: tuple[str, ...]
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    kept = os.environ.get("ANABRANCH_PICTURES")
    # Axe is a script in the page, which the page's policy would refuse.
    with browser.new_context(base_url=web.url, color_scheme=scheme, bypass_csp=True) as context:  # type: ignore[arg-type]
        looked_at = context.new_page()
        for path in pages:
            looked_at.goto(path.format(scope=scope, txn=txn.hex()))
            if kept:
                looked_at.wait_for_timeout(1200)
                file = f"{path.replace('/', '-') or 'overview'}-{scheme}.png"
                looked_at.screenshot(path=Path(kept) / file, full_page=True)
            found = Axe().run(looked_at, options=AXE[scheme])
            assert found.violations_count == 0, f"{path}: {found.generate_report()}"


@pytest.mark.soak
def test_pages_follow_what_happens(page: Page, client: anabranch.Client, scope: str) -> None:
    """Without a reload; names come out as they are."""
    page.goto(f"transactions?scope={scope}")
    page.wait_for_selector("#live.good")
    page.focus("#limit")
    txn = client.begin(scope, name=NAME)
    page.wait_for_selector(f"text={txn_text(txn.txn_id or b'')}")
    assert page.inner_text("tbody tr td:nth-child(9)") == NAME
    assert page.evaluate("document.activeElement.id") == "limit"
    txn.abort()
    page.wait_for_selector("text=None is open.")
    page.goto(f"streams/{scope}/s")
    page.wait_for_selector("svg rect.arm >> nth=1")
    page.fill("#segments", "77")
    client.scale(f"{scope}/s", 3)
    page.wait_for_selector("svg rect.arm >> nth=3")
    assert page.input_value("#segments") == "77"


@pytest.mark.soak
def test_an_open_page_is_emptied_only_if_it_may_not_be_shown(page: Page, scope: str) -> None:
    """A server that restarts, or has too many viewers, is no reason."""
    answers = [503, 503]

    def answer(route: Route) -> None:
        if route.request.resource_type == "document" or not answers:
            route.continue_()
        else:
            route.fulfill(status=answers.pop(0))

    page.route(f"**/streams/{scope}/s", answer)
    page.goto(f"streams/{scope}/s")
    page.wait_for_selector("#live.bad >> text=trying again")
    assert "Segments" in page.inner_text("#body")
    page.wait_for_selector("#live.good")
    assert "Segments" in page.inner_text("#body")
    answers[:] = [403, 403]
    page.reload()
    page.wait_for_selector("#live >> text=ended")
    assert page.inner_text("#body") == ""


@pytest.mark.long
def test_one_is_aborted_one_scaled_one_deleted(
    page: Page, client: anabranch.Client, scope: str, txn: bytes
) -> None:
    page.goto(f"transactions?scope={scope}")
    page.click(f"text={txn.hex()}")
    page.click("text=Abort …")
    assert "None of its events will ever be read." in page.inner_text("main")
    assert NAME in page.inner_text("main")
    page.click("text=Abort it")
    page.wait_for_selector("text=is aborted")
    assert client.state(txn).state == "ABORTED"
    page.click("text=Go on")
    page.wait_for_selector(".state.aborted")

    page.goto("streams")
    page.click(f"text={scope}/s")
    page.fill("#segments", "5")
    page.click("text=Scale …")
    assert "2 segments will be sealed (0@0, 1@0), and 5 opened" in page.inner_text("main")
    page.click("text=Leave it as it is")
    assert len(client.describe(f"{scope}/s").segments) == 2
    page.fill("#segments", "5")
    page.click("text=Scale …")
    page.click("text=Scale it")
    page.wait_for_selector("text=has 5 segments")
    assert len(client.describe(f"{scope}/s").segments) == 5

    page.click("text=Go on")
    page.click("text=Delete …")
    assert "are deleted for good" in page.inner_text("main")
    page.click("text=Delete it")
    page.wait_for_selector("text=is deleted")
    assert [one.stream for one in client.streams(scope)] == []
    page.go_back()  # to the question; its answer is used up
    page.goto(f"streams/{scope}/s")
    page.wait_for_selector("text=UnknownStream")


@pytest.mark.soak
def test_by_keyboard_alone(page: Page, client: anabranch.Client, scope: str, txn: bytes) -> None:
    def go_to(words: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent").strip() == words:
                return
        pytest.fail(f"no way to {words!r}")

    page.goto("")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the page"
    page.goto(f"transactions?scope={scope}")
    for words in (txn.hex(), "Abort …", "Abort it"):
        go_to(words)
        shown = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert shown == "solid"
        with page.expect_navigation():
            page.keyboard.press("Enter")
    page.wait_for_selector("text=is aborted")
    assert client.state(txn).state == "ABORTED"


@pytest.mark.soak
def test_forms_work_without_scripts(browser: Browser, web: WebProcess, scope: str) -> None:
    with browser.new_context(base_url=web.url, java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"streams/{scope}/s")
        assert page.locator("svg rect.arm").count() == 2
        page.fill("#segments", "3")
        page.click("text=Scale …")
        page.click("text=Scale it")
        assert "has 3 segments" in page.inner_text("main")
