"""Pages show the rows that `--json` prints: of streams, transactions, groups, processors and control partitions."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html import unescape
from types import SimpleNamespace
from typing import Any, NoReturn, get_args

import pytest

from anabranch.errors import NotAuthorized
from anabranch.protocol.schemas.records import TxnState
from anabranch.types import Listed
from anabranch.web import pages
from anabranch.web.hub import WATCH_S, View
from anabranch.web.pages import Pages, Showing, environment
from tests.cli.fakes import TXN_ID, FakeClient, processor, stream

OPEN = View("transactions", ("open", "", "", "", "100"))
IDLE = "2 of 4 tasks without a worker"
# Page -> the cells of rows that it has, in their order.
ROWS: dict[View, list[tuple[str, ...]]] = {
    View("streams"): [
        ("nyc/flights", "ACTIVE", "2", "2", "0", "0 B", "3", ""),
        ("nyc/weather", "ACTIVE", "2", "2", "0", "0 B", "3", ""),
    ],
    View("streams", ("weath", "ACTIVE", "100")): [
        ("nyc/weather", "ACTIVE", "2", "2", "0", "0 B", "3", ""),
    ],
    OPEN: [(TXN_ID.hex(), "nyc", "COMMITTED", "60s", "7 B", "1", "10s", "20s", "backfill", "open")],
    View("transactions", ("finished", "", "COMMITTED", "BACK", "100")): [
        (
            TXN_ID.hex(),
            "nyc",
            "COMMITTED",
            "2023-11-14 22:13:20",
            "2023-11-14 22:13:21",
            "10",
            "1",
            "2",
            "backfill",
            "open",
            "",
        )
    ],
    View("transactions", ("prepared", "nyc", "ABORTED", "", "100")): [],
    View("transactions", ("open", "", "", "nobody's", "100")): [],
    View("groups", ("deLays",)): [
        ("nyc/delays", "4", "2", "nyc/lost", "?", "?", f"{IDLE}; UnknownStream: gone"),
    ],
    View("groups"): [
        ("loaders", "Stable", "2", "nyc/flights", "events", "1,234", "0.0", ""),
        ("loaders", "Stable", "2", "nyc/weather", "transactions", "?", "?", "it is LOST"),
        ("nyc/delays", "4", "2", "nyc/lost", "?", "?", f"{IDLE}; UnknownStream: gone"),
    ],
    View("controllers", ("nothing",)): [],
    View("controllers"): [
        (
            "0",
            "host:4711",
            "2023-11-14 22:13:20",
            "7",
            "?",
            "?",
            "4,096",
            "40",
            "2",
            "3",
            "12",
            "1",
        ),
        ("2023-11-14T22:13:20.000+00:00", "17", "Commit", "RecursionError()"),
    ],
}


# Page with a filter -> the number of rows that are left, those of control partitions included.
FILTERED = {
    View("streams", ("weath", "ACTIVE", "100")): 1,
    View("transactions", ("finished", "", "COMMITTED", "BACK", "100")): 1,
    View("transactions", ("prepared", "nyc", "ABORTED", "", "100")): 0,
    View("transactions", ("open", "", "", "nobody's", "100")): 0,
    View("groups", ("deLays",)): 3,  # the processor's inputs, and the group of its name
    View("controllers", ("nothing",)): 1,
}


class Timed:
    """The fake client, whose calls take a page's timeout, too."""

    def __init__(self, client: FakeClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        return lambda *given, timeout=1.0, **named: call(*given, **named)


def cells(page: str) -> list[tuple[str, ...]]:
    """The rows of the tables of a page."""
    rows = re.findall(r"<tr>(<td.*?)</tr>", page)
    return [
        tuple(unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<td.*?</td>", row))
        for row in rows
    ]


@pytest.mark.parametrize("view", ROWS, ids=str)
def test_pages_show_the_rows_of_lists(view: View) -> None:
    client: Any = Timed(FakeClient())
    found = cells(Pages(client, environment(), 1.0, Showing()).body(view))
    assert [row for row in found if row in ROWS[view]] == ROWS[view], found
    if view in FILTERED:
        assert len([row for row in found if len(row) > 1]) == FILTERED[view], found


@pytest.mark.parametrize(
    ("show", "states"),
    [
        ("open", {"OPEN", "COMMIT_IN_PROGRESS", "FINALIZE_IN_PROGRESS", "ABORT_IN_PROGRESS", "PREPARED"}),
        ("finished", set(get_args(TxnState))),
        ("prepared", {"PREPARED"}),
    ],
)  # fmt: skip
def test_the_filter_offers_states_that_no_listed_transaction_has(
    show: str, states: set[str]
) -> None:
    client: Any = Timed(FakeClient())
    page = Pages(client, environment(), 1.0, Showing()).body(
        View("transactions", (show, "", "", "", "100"))
    )
    (choice,) = re.findall(r'<select id="state".*?</select>', page)
    assert set(re.findall(r'value="(\w+)"', choice)) == states


def test_the_overview_counts_them() -> None:
    client: Any = Timed(FakeClient())
    page = Pages(client, environment(), 1.0, Showing()).body(View("overview"))
    figures = {words: n for n, words in re.findall(r"<b>(.*?)</b> <span>(.*?)</span>", page)}
    assert figures["commands waiting"] == "2"
    assert (TXN_ID.hex(), "60s") == (cells(page)[0][0], cells(page)[0][3])


def test_pages_that_show_parts_of_a_list_share_one_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Counter[str] = Counter()
    now = 100.0

    class Counting(Timed):
        def __getattr__(self, name: str) -> Any:
            asked[name] += 1
            return super().__getattr__(name)

    client: Any = Counting(FakeClient())
    made = Pages(client, environment(), 1.0, Showing())
    monkeypatch.setattr(pages, "time", SimpleNamespace(monotonic=lambda: now))

    def poll(*views: View) -> Counter[str]:
        nonlocal now
        now += WATCH_S
        asked.clear()
        for view in views:
            made.body(view)
        return asked

    lists = View("overview"), View("streams"), OPEN
    once = {"streams": 1, "open_transactions": 1, "commands": 1}
    poll(*lists)
    assert poll(*lists) == once
    assert [what[-1] for what in made._memory._kept if what[0] == "transactions"] == [100]
    poll(View("overview"))  # the other pages are closed
    assert poll(View("overview")) == once
    assert [what[-1] for what in made._memory._kept if what[0] == "transactions"] == [5]


def test_what_the_lane_may_not_see_is_seldom_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, now = FakeClient(), 100.0
    client: Any = Timed(fake)
    asked: list[str] = []

    def refuse(what: str) -> NoReturn:
        asked.append(what)
        raise NotAuthorized("lane 'open' has no right 'operate' on *")

    monkeypatch.setattr(fake, "commands", lambda: refuse("commands"))
    monkeypatch.setattr(fake, "leaders", lambda: refuse("leaders"))
    made = Pages(client, environment(), 1.0, Showing())
    monkeypatch.setattr(pages, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(4):
        assert "no right &#39;operate&#39;" in made.body(View("controllers"))
        assert "commands waiting" not in made.body(View("overview"))
        now += WATCH_S
    assert asked == ["commands"]
    now += pages._REFUSED_S
    made.body(View("controllers"))
    assert asked == ["commands"] * 2


def test_a_transaction_s_page_shows_its_staged_merge_and_its_parts() -> None:
    client: Any = Timed(FakeClient())
    page = Pages(client, environment(), 1.0, Showing(acts=True)).body(
        View("transaction", (TXN_ID.hex(),))
    )
    assert re.findall(r"<progress (.*?)>.*?(\S+ of .*?)</li>", page) == [
        ('max="10" value="5" aria-label="staged of partition 1"', "5 of 10 events")
    ]
    assert ("0000000000000005", "loader 7", "open", "10", "yes") in cells(page)
    assert {("1", "ber", "COMMITTED"), ("2", "known only there", "COMMITTED")} <= {*cells(page)}


def test_a_transaction_s_page_shows_its_timeline() -> None:
    fake = FakeClient()
    client: Any = Timed(fake)
    pages = Pages(client, environment(), 1.0, Showing())
    view = View("transaction", (TXN_ID.hex(),))
    page = pages.body(view)
    waited = "the journals of nyc/flights to show the receipts of 05"
    at = "2023-11-14T22:13:21.500+00:00"
    assert (at, "1,500", "1,500", "decided", "", waited, "controller") in cells(page)
    assert "the rest is gone" in page
    assert pages.body(view) == page
    asked = [call for call, _ in fake.calls]
    assert (asked.count("timeline"), asked.count("open_transaction")) == (1, 2)
    fake.info = replace(fake.info, state="ABORTED")
    pages.body(view)
    assert [call for call, _ in fake.calls].count("timeline") == 2


def test_a_mirror_says_whose_it_is() -> None:
    client: Any = Timed(FakeClient())
    page = Pages(client, environment(), 1.0, Showing()).body(View("groups"))
    (row,) = [line for line in page.splitlines() if "nyc.delays" in line]
    assert "mirror of the processor nyc/delays" in row
    assert page.count("mirror of") == 1


def test_a_processor_s_page_draws_its_topology() -> None:
    client: Any = Timed(FakeClient())
    page = Pages(client, environment(), 1.0, Showing()).body(View("processor", ("nyc/delays",)))
    (svg,) = re.findall(r"<svg class='topology'.*?</svg>", page)
    assert re.findall(r"<g class='(\w+)'><title>([^<]*)</title>", svg) == [
        ("input", svg_text("nyc/flights: ~12,345 behind, ", svg)),
        ("input", "nyc/lost: UnknownStream: gone"),
        ("call", "count\\x1b[2J"),
        ("store", "totals: a store of json"),
        ("output", "nyc/hours"),
        ("output", "nyc/other"),
    ]
    assert re.findall(r"<path class='(\w+)'", svg) == ["flow", "use", "flow"]
    assert [row[0] for row in cells(page) if "host:7" in row] == ["1", "2"]
    assert IDLE in page


def svg_text(begin: str, svg: str) -> str:
    """The title that begins like this."""
    titles: list[str] = re.findall("<title>([^<]*)</title>", svg)
    return next(title for title in titles if title.startswith(begin))


def test_a_processor_s_page_without_a_declaration() -> None:
    fake = FakeClient()
    client: Any = Timed(fake)
    client.processor = lambda name, **_: replace(
        processor(name), stores=("totals",), origin="nyc/a", phase="savepoint"
    )
    page = Pages(client, environment(), 1.0, Showing()).body(View("processor", ("nyc/kept",)))
    assert "No program has declared" in page
    assert "<title>totals: a store</title>" in page
    assert 'href="/processors/nyc/a"' in page
    assert IDLE not in page, "it is never run"


def test_groups_show_no_streams_that_the_lane_may_not_see() -> None:
    """Brokers show the process all groups, also those of other streams."""
    client: Any = Timed(FakeClient())
    client.streams = lambda timeout: Listed([stream("nyc/flights")])
    page = Pages(client, environment(), 1.0, Showing()).body(View("groups"))
    assert "nyc/flights" in page
    assert "nyc/weather" not in page
