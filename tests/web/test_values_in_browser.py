"""Events, rows and lists in Debian's Chromium, clicked through: light and dark, on a screen and a phone.

``ANABRANCH_PICTURES=DIR`` keeps a picture of each page, to be looked at.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import anabranch
from tests.web.conftest import WebProcess
from tests.web.test_browser import page
from tests.web.test_values import HOSTILE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["page"]
pytestmark = [pytest.mark.broker, pytest.mark.long]
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 800}


@pytest.fixture
def shop(client: anabranch.Client, unique: str) -> str:
    """A scope with a stream of 30 orders, and a table of three rows, each in two versions."""
    client.create_stream(f"{unique}/orders", segments=2)
    client.create_table(f"{unique}/stock")
    for number in range(30):
        with client.begin(unique) as txn:
            order = {"order": number, "items": [{"name": "apples", "count": number % 5}]}
            txn.write(
                f"{unique}/orders", json.dumps(order).encode(), f"customer-{number % 3}".encode()
            )
            txn.commit()
    for value in (b'{"left":9}', b'{"left":8}'):
        with client.begin(unique) as txn:
            for key in (b"apples", b"pears", b"plums"):
                txn.write(f"{unique}/stock", value, key)
            txn.commit()
    return unique


def test_events_by_key_and_transaction_and_live(
    page: Page, client: anabranch.Client, shop: str
) -> None:
    page.goto("streams")
    page.fill("#q", f"{shop}/ord")
    page.click("text=Show")
    assert page.locator("tbody tr").count() == 1
    page.click(f"text={shop}/orders")
    page.click("nav.parts >> text=Events")
    page.wait_for_selector("#live.good")
    assert page.locator("table.events > tbody > tr").count() == 30
    page.click("summary >> nth=0")
    assert '"name": "apples"' in page.inner_text("pre >> nth=0")
    # What is open stays open when the page changes.
    with client.begin(shop) as txn:
        txn.write(f"{shop}/orders", b"the newest", b"customer-9")
        txn.commit()
    page.wait_for_selector("text=the newest")
    assert page.locator("details[open]").count() == 1
    page.click("tbody a:has-text('customer-2') >> nth=0")
    page.wait_for_selector("#live.good")
    assert page.locator("table.events > tbody > tr").count() == 10
    page.click("td a.id >> nth=0")
    assert "COMMITTED" in page.inner_text("h1")
    page.click("dd a:has-text('events')")
    assert page.locator("table.events > tbody > tr").count() == 1
    page.click("text=Newest")
    page.fill("#q", '"order": 17')
    page.click("text=Show")
    assert page.locator("table.events > tbody > tr").count() == 1


def test_an_open_page_loses_its_content_when_the_login_has_ended(page: Page, shop: str) -> None:
    page.route(
        f"**/streams/{shop}/orders/events",
        lambda route: (
            route.fulfill(status=401)
            if route.request.resource_type in ("eventsource", "fetch")
            else route.continue_()
        ),
    )
    page.goto(f"streams/{shop}/orders/events")
    page.wait_for_selector("#live.bad:has-text('reload the page')")
    assert page.locator("#body > *").count() == 0


def test_rows_and_versions(page: Page, client: anabranch.Client, shop: str) -> None:
    page.goto(f"streams/{shop}/stock")
    page.click("nav.parts >> text=Rows")
    page.wait_for_selector("table.events >> text=plums", timeout=20_000)
    assert page.locator("table.events > tbody > tr").count() == 3
    page.fill("#prefix", "p")
    page.click("text=Show")
    assert page.locator("table.events > tbody > tr").count() == 2
    page.click("[aria-label='versions of pears']")
    page.wait_for_selector("text=Versions of")
    assert page.locator("table.events > tbody > tr").count() == 2
    assert '"left": 9' in page.text_content("tbody tr:nth-child(2)")  # type: ignore[operator]


def test_finished_transactions(page: Page, client: anabranch.Client, shop: str) -> None:
    page.goto("transactions")
    page.select_option("#show", "finished")
    page.click("text=Show >> nth=-1")
    page.select_option("#scope", shop)
    page.click("button:has-text('Show')")
    assert page.locator("tbody tr").count() == 32
    page.select_option("#state", "COMMITTED")
    page.fill("#q", "no transaction has this")
    page.click("button:has-text('Show')")
    page.wait_for_selector("text=None is here.")


def test_hostile_values_do_nothing(page: Page, client: anabranch.Client, shop: str) -> None:
    """The page's console stays empty, and its height small."""
    client.create_stream(f"{shop}/hostile", settings={"max.message.bytes": 20 << 20})
    with client.begin(shop, keepalive=120) as txn:
        for name, value in HOSTILE.items():
            txn.write(f"{shop}/hostile", value, value[:500], headers={name: value[:500]})
        txn.commit(timeout=60)
    page.goto(f"streams/{shop}/hostile/events")
    page.wait_for_selector("#live.good")
    assert page.locator("table.events > tbody > tr").count() >= 1
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.locator("main script, main img, main iframe").count() == 0
    assert page.evaluate("document.body.scrollHeight") < 12_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desk", "phone"])
def test_pages_fit_and_are_fit_for_all(
    browser: Browser, web: WebProcess, client: anabranch.Client, shop: str, scheme: str, size: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    kept = os.environ.get("ANABRANCH_PICTURES")
    viewport = PHONE if size == "phone" else DESK
    paths = {
        "overview": "",
        "streams": "streams",
        "stream": f"streams/{shop}/orders",
        "events": f"streams/{shop}/orders/events",
        "rows": f"streams/{shop}/stock/rows",
        "versions": f"streams/{shop}/stock/versions?key=pears",
        "finished": f"transactions?show=finished&scope={shop}",
        "groups": "groups",
        "controllers": "controllers",
    }
    # Axe is a script in the page, which the page's policy would refuse.
    with browser.new_context(
        base_url=web.url,
        color_scheme=scheme,  # type: ignore[arg-type]
        viewport=viewport,  # type: ignore[arg-type]
        bypass_csp=True,
    ) as context:
        looked_at = context.new_page()
        for name, path in paths.items():
            looked_at.goto(path)
            looked_at.wait_for_selector("#live.good")
            if name in ("events", "rows", "versions"):
                looked_at.wait_for_selector("table.events details", timeout=20_000)
                looked_at.click("summary >> nth=0")
            if kept:
                looked_at.screenshot(path=Path(kept) / f"{name}-{scheme}-{size}.png")
            wide = looked_at.evaluate("document.documentElement.scrollWidth")
            assert wide <= viewport["width"], f"{name} is {wide} wide"
            found = Axe().run(looked_at)
            assert found.violations_count == 0, f"{name}: {found.generate_report()}"
