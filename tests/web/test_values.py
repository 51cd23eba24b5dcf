"""Events and rows on pages, over a cluster in memory: which, within which bounds, decoded, harmless, by right."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.requests import Request

import anabranch
from anabranch.errors import AnabranchError, IllegalState, InvalidArgument, NotAuthorized, NotReady
from anabranch.ports import TableError
from anabranch.presentation.rows import laid_out
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.tables.snapshot import TableSnapshot
from anabranch.testing.memory.cluster import MemoryCluster
from anabranch.values import stream_of
from anabranch.web import app, events, folders, pages
from anabranch.web import tables as tables_module
from anabranch.web.events import Bounds, Search, after, newest, of_commit
from anabranch.web.hub import View
from anabranch.web.pages import Pages, Showing, environment

STREAM, TABLE = "shop/orders", "shop/stock"
HOSTILE = {
    "markup": b"<script>alert(1)</script><img src=x onerror=alert(1)>",
    "an attribute": b"\" onmouseover='alert(1)' x=\"",
    "JSON with markup": b'{"</pre><script>alert(1)</script>": "<b>"}',
    "escapes of a terminal": b"\x1b[2J\x1b]0;owned\x07",
    "a text that runs backwards": "\u202egnp.exe\u2066".encode(),
    "no UTF-8": bytes(range(128, 256)),
    "deep": b"[" * 100_000,
    "deep and whole": b"[" * 3000 + b"]" * 3000,
    "a long number": b"[" + b"9" * 10_000 + b"]",
    "a template": b"{{ 7 * 7 }} {% raw %}",
    "10 MB": b'{"x": "' + b"<" * 10_000_000 + b'"}',
}


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
def client(cluster: MemoryCluster) -> Iterator[anabranch.Client]:
    with cluster.connect(timeout=5, one_shot_bytes=1 << 20) as opened:
        opened.create_stream(STREAM, segments=2, settings={"max.message.bytes": 20 << 20})
        yield opened


def write(client: anabranch.Client, stream: str, *rows: tuple[bytes | None, bytes | None]) -> int:
    """Commit these keys and values; the commit timestamp."""
    with client.begin(stream.partition("/")[0]) as txn:
        for key, value in rows:
            txn.write(stream, value, key)
        return txn.commit().commit_timestamp


def made(client: anabranch.Client, **showing: Any) -> Pages:
    return Pages(client, environment(), 5.0, Showing(values=True, **showing))


def events_page(found: Pages, **asked: str) -> str:
    fields = ("key", "q", "from", "commit", "txn")
    about = (STREAM, *(asked.get(each.strip("_"), "") for each in fields), asked.get("limit", "20"))
    return found.body(View("events", about))


def values_of(page: str) -> list[str]:
    """The beginnings of the values of a page of events."""
    cells = re.findall(
        r'<td class="value">(?:<details[^>]*><summary>)?<code>(.*?)</code>', page, re.S
    )
    return [unescape(each) for each in cells]


def numbers(part: events.Part) -> list[int]:
    return [int(each.value or b"0") for each in part.events]


# -- which events -----------------------------------------------------------------------------------------


def search(count: int, is_wanted: Callable[[Any], bool] | None = None, **bounds: Any) -> Search:
    return Search(STREAM, count, is_wanted, 5.0, Bounds(**bounds))


def test_the_newest_events_whatever_the_commits_sizes(client: anabranch.Client) -> None:
    assert newest(client, search(5)).events == []
    write(client, STREAM, *((b"k%d" % n, b"%d" % n) for n in range(40)))
    for n in range(40, 60):
        write(client, STREAM, (b"k%d" % n, b"%d" % n))
    assert numbers(newest(client, search(5))) == [55, 56, 57, 58, 59]
    assert sorted(numbers(newest(client, search(30)))) == sorted(
        [*range(40, 60), *_last_of(client, 10)]
    )
    assert numbers(newest(client, search(1000)))[-20:] == list(range(40, 60))
    assert len(newest(client, search(1000)).events) == 60


def _last_of(client: anabranch.Client, count: int) -> list[int]:
    """The last events, in the order of places, of the first commit."""
    read = client.snapshot(STREAM).read(STREAM)
    first = sorted((e.commit_timestamp, e.partition, e.offset, int(e.value or b"0")) for e in read)[
        :40
    ]
    return [number for *_, number in first][-count:]


def test_a_filter_looks_farther_back_and_says_when_it_stops(client: anabranch.Client) -> None:
    write(client, STREAM, (b"rare", b"0"))
    for n in range(1, 120):
        write(client, STREAM, (b"k", b"%d" % n))
    rare = newest(client, search(2, lambda event: event.key == b"rare"))
    assert (numbers(rare), rare.ended) == ([0], "")
    bounded = newest(client, search(2, lambda event: event.key == b"rare", events=30))
    assert (numbers(bounded), "30 events" in bounded.ended or "offsets" in bounded.ended) == (
        [],
        True,
    )


def test_huge_events_end_a_read_at_the_newest_ones(client: anabranch.Client) -> None:
    for n in range(12):
        write(client, STREAM, (b"k", b"%d" % n + b" " * 100_000))
    part = newest(client, search(10, bytes=250_000))
    assert numbers(part)[-1] == 11
    assert 1 <= len(part.events) <= 4
    assert part.ended


def test_all_reads_of_a_search_have_one_deadline(
    client: anabranch.Client, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(60):
        write(client, STREAM, (b"k", b"%d" % n + b" " * (10_000 if n < 40 else 100_000)))
    reads = slow(anabranch.Snapshot, "read", cluster, monkeypatch)
    part = newest(client, search(60, bytes=250_000))
    assert (len(reads), part.ended) == (2, "after 1.5 s")


def test_a_search_does_not_look_farther_back_when_it_is_late(
    client: anabranch.Client, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(40):
        write(client, STREAM, (b"k", b"%d" % n))
    slow(events, "before_newest", cluster, monkeypatch)
    reads = slow(anabranch.Snapshot, "read", cluster, monkeypatch, 0.0)
    part = newest(client, search(1, lambda event: False))
    assert (len(reads), part.ended) == (1, "after 1.5 s")


def slow(
    where: Any, name: str, cluster: MemoryCluster, patch: pytest.MonkeyPatch, seconds: float = 1.0
) -> list[None]:
    """Let each call of this name take this time; a list with an item for each."""
    found: list[None] = []
    call = getattr(where, name)

    def slowly(*given: Any, **named: Any) -> Any:
        found.append(None)
        cluster.clock.now += seconds
        return call(*given, **named)

    patch.setattr(where, name, slowly)
    return found


def test_events_after_a_time_page_by_page(client: anabranch.Client) -> None:
    stamps = [
        write(client, STREAM, *((b"k", b"%d" % (10 * n + i)) for i in range(3))) for n in range(9)
    ]
    first = after(client, search(6), stamps[1])
    assert numbers(first) == [20, 21, 22, 30, 31, 32]
    assert (first.more, first.ended) == (True, "")
    assert numbers(after(client, search(6), first.until)) == [40, 41, 42, 50, 51, 52]
    assert not after(client, search(6), stamps[7]).more
    assert numbers(after(client, search(3), None)) == [0, 1, 2]
    assert after(client, search(6), stamps[8]).events == []
    cut = after(client, search(2), stamps[1])
    assert (numbers(cut), cut.ended) == ([20, 21], "at 2 events")
    one = of_commit(client, search(9), stamps[4])
    assert numbers(one) == [40, 41, 42]


def test_nothing_new_is_not_read_again(
    client: anabranch.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, STREAM, (b"k", b"1"))
    known = newest(client, search(5))
    assert newest(client, search(5), known) is known
    write(client, STREAM, (b"k", b"2"))
    assert numbers(newest(client, search(5), known)) == [1, 2]


def test_a_page_asks_the_controller_only_for_the_right(
    client: anabranch.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(30):
        write(client, STREAM, (b"k", b"%d" % n))
    found = made(client)
    sent: list[Any] = []
    bus = client._shared.ports.bus
    send = bus.send

    def counted(*given: Any) -> None:
        sent.append(given)
        send(*given)

    monkeypatch.setattr(bus, "send", counted)
    assert values_of(events_page(found)) == [str(n) for n in range(29, 9, -1)]
    assert len(sent) == 1


# -- pages ------------------------------------------------------------------------------------------------


def test_events_by_key_text_time_commit_and_transaction(client: anabranch.Client) -> None:
    first = write(client, STREAM, (b"a", b"apples"), (b"b", b"pears"))
    second = write(
        client, STREAM, (b"a", b"plums"), (None, b"none"), (b"\xff", b"raw"), (b"b", None)
    )
    found = made(client)
    assert sorted(values_of(events_page(found))) == ["apples", "none", "pears", "plums", "raw"]
    assert values_of(events_page(found, key="a")) == ["plums", "apples"]
    assert values_of(events_page(found, key="\udcff")) == ["raw"]
    assert "key=%FF" in events_page(found)
    assert 'value="\\xff"' in events_page(found, key="\udcff"), "a form can't send the byte"
    assert values_of(events_page(found, key="\\xff")) == ["raw"]
    assert sorted(values_of(events_page(found, q="p"))) == ["apples", "pears", "plums"]
    assert sorted(values_of(events_page(found, **{"from": str(first)}))) == ["none", "plums", "raw"]
    assert sorted(values_of(events_page(found, commit=str(first)))) == ["apples", "pears"]
    txn = next(iter(client.snapshot(STREAM, second, second - 1).read(STREAM))).txn_id
    assert txn is not None
    assert sorted(values_of(events_page(found, txn=txn.hex()))) == ["none", "plums", "raw"]
    with client.begin("shop") as txn_open:
        txn_open.token()
        assert txn_open.txn_id is not None
        with pytest.raises(InvalidArgument, match="no committed events"):
            events_page(found, txn=txn_open.txn_id.hex())
        txn_open.abort()
    for wrong in ({"from": "yesterday"}, {"from": "2026-01-01T00:00:00"}, {"commit": "x"}):
        with pytest.raises(InvalidArgument):
            events_page(found, **wrong)


def test_a_one_shot_s_page_leads_to_its_events(client: anabranch.Client) -> None:
    """Its controller does not know its streams any more."""
    client.create_stream("bakery/bread")
    with client.begin("shop") as txn:
        txn.write(STREAM, b"apples")
        txn.write("bakery/bread", b"buns")
        at = txn.commit().commit_timestamp
        assert txn.txn_id is not None
        assert client.state(txn.txn_id).streams == ()
    page = made(client).body(View("transaction", (txn.txn_id.hex(),)))
    assert f"/streams/{STREAM}/events?commit={at}" in page
    assert f"/streams/bakery/bread/events?commit={at}" in page


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_hostile_values_are_harmless(client: anabranch.Client, value: bytes) -> None:
    """As value, key and header; the page stays small, and quick."""
    key = value[:1000]
    with client.begin("shop") as txn:
        txn.write(STREAM, value, key, headers={value[:60].decode("latin-1"): key})
        txn.commit()
    began = time.process_time()
    page = events_page(made(client))
    assert time.process_time() - began < 3
    assert len(page.encode()) < 40_000
    shown = re.sub(
        r"<(/?(a|b|button|code|dd|details|div|dl|dt|form|h1|h2|input|label|nav|option|p|pre|section|"
        r"select|span|summary|table|tbody|td|th|thead|tr))( [a-z-]+=\"[^\"<>]*\"| selected| open)*>",
        "",
        page,
    )
    assert "<" not in shown
    assert not [c for c in shown if not c.isprintable() and c != "\n"]
    handler = re.search(r"<[^>]* on[a-z]+=", page)
    assert handler is None, handler
    if len(value) > 1_000_000:
        assert "10,000,009 bytes" in page


def test_json_is_laid_out_as_it_was_written() -> None:
    data = b'{"b":1.50,"a":[1e3,{}],"b":[],"\\u00e9":"x\\ty"}'
    laid = laid_out(data, data, 4000)
    assert laid.text == (
        '{\n  "b": 1.50,\n  "a": [\n    1e3,\n    {}\n  ],\n  "b": [],\n  "\\u00e9": "x\\ty"\n}'
    )
    assert (laid.size, laid.cut, laid.line) == (len(data), False, data.decode())
    short = laid_out(data, data, 10)
    assert (len(short.text), short.cut) == (10, True)
    assert laid_out(b"{no", b"{no", 100).text == "{no"


def test_no_more_json_is_laid_out_than_is_shown() -> None:
    data = b"[" + b"1," * 120_000 + b"1]"
    tracemalloc.start()
    try:
        laid = laid_out(data, data, 4000)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(laid.text), laid.cut) == (4000, True)
    assert most < 4_000_000  # all of its parts take 11 MB
    assert laid_out(b"[1,2]", b"[1,2]", 12).cut is False
    assert laid_out(b"[1,2]", b"[1,2]", 11).text == "[\n  1,\n  2\n"


def test_values_are_decoded_by_the_codec_of_the_stream(client: anabranch.Client) -> None:
    def decode(data: bytes) -> Any:
        if data == b"bad":
            raise ZeroDivisionError("oh <b>no</b>")
        return {"decoded": data.decode().upper()}

    def handle(name: str) -> Any:
        return stream_of(name, str, (json.dumps, decode), "raise")

    write(client, STREAM, ("clé".encode(), b"abc"), (b"k", b"bad"))
    page = events_page(made(client, handle=handle))
    assert '{"decoded":"ABC"}' in values_of(page)
    assert "bad" in values_of(page)
    assert "ZeroDivisionError: oh &lt;b&gt;no" in page
    write(client, STREAM, (None, b"bad"))
    assert "key None: codec" in events_page(made(client, handle=handle))
    assert values_of(events_page(made(client, handle=handle), key="clé")) == ['{"decoded":"ABC"}']


def test_a_huge_key_is_shown_without_a_link(client: anabranch.Client) -> None:
    write(client, STREAM, (b"k" * 1000, b"short"), (b"<" * 10_000_000, b"long"), (None, b"none"))
    page = events_page(made(client))
    assert len(page.encode()) < 40_000
    assert f"key={'k' * 1000}" in page
    assert f"<td><code>{'&lt;' * 120}…</code></td>" in page
    assert len(re.findall('<td><span class="soft">[^<]</span></td>', page)) == 1


def test_keys_and_headers_have_weight(
    client: anabranch.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(12):
        with client.begin("shop") as txn:
            txn.write(STREAM, b"%d" % n, headers={"h" * 50_000: b"h" * 50_000})
            txn.commit()
    part = newest(client, search(10, bytes=250_000))
    assert numbers(part)[-1] == 11
    assert 1 <= len(part.events) <= 4
    assert events.weight(part.events[0]) >= 100_001
    found = made(client)
    events_page(found)
    assert len(found._newest) == 1
    monkeypatch.setattr(pages, "_MOST_READ_BYTES", 1_000_000)
    write(client, STREAM, (b"k", b"12"))
    events_page(found)
    assert not found._newest


def nested(data: bytes) -> Any:
    made: Any = []
    for _ in range(100_000):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("decode", "names"),
    [(nested, "RecursionError"), (lambda data: {data: 1}, "TypeError")],
    ids=["deep", "a dictionary of bytes"],
)
def test_a_value_that_can_t_be_laid_out_is_shown_as_bytes(
    client: anabranch.Client, decode: Callable[[bytes], Any], names: str
) -> None:
    def handle(name: str) -> Any:
        return stream_of(name, (str, decode), (str, decode), "raise")

    write(client, STREAM, (b"k", b"abc"))
    page = events_page(made(client, handle=handle))
    assert values_of(page) == ["abc"]
    assert f"can&#39;t be shown ({names}: " in page
    assert values_of(events_page(made(client, handle=handle), key="other")) == []


def test_a_key_with_half_a_character_is_searched(client: anabranch.Client) -> None:
    def handle(name: str) -> Any:
        return stream_of(name, json, str, "raise")

    write(client, STREAM, (b'"\\ud800"', b"half"), (b'"k"', b"whole"))
    found = made(client, handle=handle)
    assert sorted(values_of(events_page(found))) == ["half", "whole"]
    assert values_of(events_page(found, key="k")) == ["whole"]
    assert values_of(events_page(found, key='"\\ud800"')) == ["half"]


def test_what_a_codec_says_is_short_and_names_the_key(client: anabranch.Client) -> None:
    def decode(data: bytes) -> Any:
        raise ValueError("\u202e\x1b" + "x" * 1_000_000)

    write(client, STREAM, (b"the-key", b"abc"))
    page = events_page(
        made(client, handle=lambda name: stream_of(name, str, (str, decode), "raise"))
    )
    said = unescape(re.findall('<p class="alarm">(.*?)</p>', page)[0])
    assert "key b'the-key'" in said
    assert "\\u202e\\x1bxxx" in said
    assert len(said) < 600


# -- rights -----------------------------------------------------------------------------------------------


def test_a_page_shows_no_more_than_its_lane_may(
    cluster: MemoryCluster, client: anabranch.Client
) -> None:
    """The process itself may read every topic."""
    client.create_table(TABLE)
    write(client, STREAM, (b"k", b"secret"))
    with cluster.connect(lane=ADMIN_LANE, timeout=5) as admin:
        found = made(client)
        assert "secret" in events_page(found)
        admin.revoke("open", "*", ["describe"])
        for about in (
            View("events", (STREAM, "", "", "", "", "", "20")),
            View("rows", (TABLE, "", "", "", "", "20")),
            View("versions", (TABLE, "k", "")),
            View("stream", (STREAM,)),
        ):
            with pytest.raises(NotAuthorized):
                found.body(about)
        assert STREAM not in found.body(View("streams"))


def test_without_values_no_page_shows_them(client: anabranch.Client) -> None:
    write(client, STREAM, (b"k", b"secret"))
    hidden = Pages(client, environment(), 5.0, Showing())
    for about in (
        View("events", (STREAM, "", "", "", "", "", "20")),
        View("rows", (STREAM, "", "", "", "", "20")),
        View("versions", (STREAM, "k", "")),
    ):
        with pytest.raises(NotAuthorized, match="--show-values"):
            hidden.body(about)
    assert "/events" not in hidden.body(View("stream", (STREAM,)))


def test_without_values_no_reason_names_a_key(
    cluster: MemoryCluster, client: anabranch.Client
) -> None:
    with client.begin("shop") as txn:
        txn.write(STREAM, b"x")
        txn.token()
        assert txn.txn_id is not None
        with cluster.connect(lane=ADMIN_LANE, timeout=5) as admin:
            admin.abort(txn.txn_id, "row b'the-key' was read")
        name = txn.txn_id.hex()
        for shows in (False, True):
            found = Pages(client, environment(), 5.0, Showing(values=shows))
            bodies = [
                found.body(View("transactions", ("finished", "", "", "", "100"))),
                found.body(View("transaction", (name,))),
            ]
            for body in bodies:
                assert ("the-key" in body, "hidden: see --show-values" in body) == (
                    shows,
                    not shows,
                )
            timeline = bodies[1].partition("Timeline</h2>")[2]
            assert ("the-key" in timeline) == shows
            searched = found.body(View("transactions", ("finished", "", "", "the-key", "100")))
            assert (f'href="/transactions/{name}"' in searched) == shows


# -- tables -----------------------------------------------------------------------------------------------


@pytest.fixture
def stock(client: anabranch.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    """Pages on a table, whose replicas move when somebody waits."""
    client.create_table(TABLE)
    replica = client.replica
    monkeypatch.setattr(client, "replica", lambda *t, **how: replica(*t, threads=False, **how))
    found = made(client)
    yield found
    found.close()


def kept_by(found: Pages) -> dict[str, Any]:
    """The replicas that pages keep, by table."""
    assert found._tables is not None
    return found._tables._kept


def rows(page: str) -> list[tuple[str, str]]:
    found = re.findall(
        r"<tr><td><code>(.*?)</code></td><td class=\"value\">.*?<code>(.*?)</code>", page, re.S
    )
    return [(unescape(key), unescape(value)) for key, value in found]


def test_rows_page_by_page_and_their_versions(client: anabranch.Client, stock: Pages) -> None:
    before = write(client, TABLE, *((b"k%02d" % n, b"v%d" % n) for n in range(30)))
    write(client, TABLE, (b"k03", b"new"), (b"k04", None), (b"x\xff", b"odd"))
    page = stock.body(View("rows", (TABLE, "", "", "", "", "20")))
    assert [key for key, _ in rows(page)] == [f"k{n:02}" for n in range(21) if n != 4]
    assert ("k03", "new") in rows(page)
    assert "from=k21" in page
    last = stock.body(View("rows", (TABLE, "", "k21", "", "", "20")))
    assert [key for key, _ in rows(last)] == [*(f"k{n}" for n in range(21, 30)), "x\\xff"]
    assert "Next rows" not in last
    assert [k for k, _ in rows(stock.body(View("rows", (TABLE, "x", "", "", "", "20"))))] == [
        "x\\xff"
    ]
    old = stock.body(View("rows", (TABLE, "k0", "", "", str(before), "20")))
    assert rows(old)[3:5] == [("k03", "v3"), ("k04", "v4")]
    versions = stock.body(View("versions", (TABLE, "k03", "")))
    assert values_of(versions) == ["new", "v3"]


def test_a_table_that_is_too_big_says_what_to_do(
    client: anabranch.Client, stock: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, TABLE, *((b"%d" % n, b"") for n in range(5)))
    monkeypatch.setattr(tables_module, "MOST_EVENTS", 4)
    with pytest.raises(InvalidArgument, match="anabranch table scan"):
        stock.body(View("rows", (TABLE, "", "", "", "", "20")))


def test_a_table_that_is_loading_is_said(
    client: anabranch.Client, stock: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, TABLE, (b"k", b"v"))
    stock.body(View("rows", (TABLE, "", "", "", "", "20")))
    kept = kept_by(stock)[TABLE].replica

    def slow(*_: object, **__: object) -> None:
        raise NotReady("not complete")

    monkeypatch.setattr(kept, "snapshot", slow)
    assert "being loaded" in stock.body(View("rows", (TABLE, "", "", "", "", "20")))


def test_a_stream_is_no_table(stock: Pages) -> None:
    with pytest.raises(InvalidArgument, match="no table"):
        stock.body(View("rows", (STREAM, "", "", "", "", "20")))


def test_idle_replicas_are_closed(client: anabranch.Client, stock: Pages) -> None:
    write(client, TABLE, (b"k", b"v"))
    stock.body(View("rows", (TABLE, "", "", "", "", "20")))
    kept = kept_by(stock)[TABLE]
    kept.used -= 2 * tables_module._IDLE_S
    stock.sweep()
    assert kept_by(stock) == {}
    with pytest.raises(IllegalState):
        kept.replica.snapshot()


def test_a_table_that_people_look_at_is_not_replaced(
    client: anabranch.Client, stock: Pages
) -> None:
    tables = [f"shop/t{n}" for n in range(tables_module._MOST_TABLES + 1)]
    for table in tables:
        client.create_table(table)
        write(client, table, (b"key", table.encode()))

    def page(table: str) -> str:
        return stock.body(View("rows", (table, "", "", "", "", "20")))

    for table in tables[:-1]:
        assert rows(page(table)) == [("key", table)]
    kept = dict(kept_by(stock))
    for _ in range(3):  # each look loads no table again
        refused = page(tables[-1])
        assert "people look at 4 other tables (shop/t0, " in refused
        assert rows(refused) == []
        for table in tables[:-1]:
            assert rows(page(table)) == [("key", table)]
    assert kept_by(stock) == kept
    kept_by(stock)[tables[1]].used -= tables_module._BUSY_S + 1
    assert rows(page(tables[-1])) == [("key", tables[-1])]
    assert sorted(kept_by(stock)) == [tables[0], *tables[2:]]


def test_replicas_have_a_bound_of_bytes_on_disk(
    client: anabranch.Client, stock: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_table("shop/small")
    write(client, TABLE, *((b"%d" % n, b"v" * 10_000) for n in range(50)))
    for table in ("shop/small", TABLE):
        stock.body(View("rows", (table, "", "", "", "", "20")))
    sizes = {table: folders.size_of(kept.folder) for table, kept in kept_by(stock).items()}
    assert sizes[TABLE] > sizes["shop/small"]
    folder = kept_by(stock)[TABLE].folder
    monkeypatch.setattr(tables_module, "_MOST_DISK", sizes[TABLE])
    stock.sweep()
    assert list(kept_by(stock)) == ["shop/small"]
    assert not folder.exists()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="MiB of disk"):
            stock.body(View("rows", (TABLE, "", "", "", "", "20")))
    stock._replicas()._refused.clear()  # some time later
    monkeypatch.setattr(tables_module, "_MOST_DISK", 1 << 30)
    assert len(rows(stock.body(View("rows", (TABLE, "", "", "", "", "20"))))) == 20


def test_folders_of_killed_processes_are_removed_at_the_next_start(
    client: anabranch.Client, stock: Pages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal\n"
        "from anabranch.web.folders import Folders\n"
        "kept = Folders()\n"
        "(kept.new() / 'rows').mkdir(parents=True)\n"
        "print(kept.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    left = Path(killed.stdout.strip())
    assert (killed.returncode, (left / "1" / "rows").is_dir()) == (-signal.SIGKILL, True)
    other = tmp_path / "anabranch-web-other"  # not made by a web process
    other.mkdir()
    alive = folders.Folders()
    stock.sweep()
    assert sorted(tmp_path.iterdir()) == sorted([other, alive.path])
    stock.body(View("rows", (TABLE, "", "", "", "", "20")))
    assert len(list(tmp_path.iterdir())) == 3
    stock.close()
    alive.close()
    assert list(tmp_path.iterdir()) == [other]


def test_rows_with_long_keys_page_by_page(client: anabranch.Client, stock: Pages) -> None:
    """Links have the first 1,000 bytes of a key, which many keys may have in common."""
    keys = [b"k" * 1000 + b"%03d" % n for n in range(50)]
    keys += [b"k" * 500, b"k" * 998 + b"l", b"\xff" * 8000, b"\xff" * 8001, b"z" * 1000]
    write(client, TABLE, *((key, b"") for key in keys))
    for prefix in (b"", b"k" * 600, b"k" * 1000):
        shown: list[tuple[str, str]] = []
        link = f"/streams/{TABLE}/rows?" + urlencode({"prefix": prefix, "limit": 20})
        while link:
            scope = {"type": "http", "query_string": link.partition("?")[2].encode(), "headers": [],
                     "path_params": dict(zip(("scope", "name"), TABLE.split("/"), strict=True))}  # fmt: skip
            page = stock.body(app._rows(Request(scope)))
            shown += rows(page)
            found = re.search(r'href="([^"]*)">Next rows', page)
            link = unescape(found[1]) if found else ""
            assert len(shown) <= len(keys)
        assert len(shown) == sum(1 for key in keys if key.startswith(prefix)), prefix


def test_versions_of_a_row_have_a_bound_of_bytes(
    client: anabranch.Client, stock: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(5):
        write(client, TABLE, (b"k", b"%d" % n * 100))
    monkeypatch.setattr(tables_module, "_MOST_BYTES", 150)
    versions = values_of(stock.body(View("versions", (TABLE, "k", ""))))
    assert versions == ["4" * 100, "3" * 100]


def test_a_row_with_a_long_key_has_no_link(client: anabranch.Client, stock: Pages) -> None:
    write(client, TABLE, (b"k" * 1001, b"v"))
    page = stock.body(View("rows", (TABLE, "", "", "", "", "20")))
    assert "too long for a link" in page
    assert "/versions?" not in page


def test_rows_of_a_past_moment_need_the_right_of_today(
    cluster: MemoryCluster, client: anabranch.Client, stock: Pages
) -> None:
    at = write(client, TABLE, (b"k", b"v"))
    assert rows(stock.body(View("rows", (TABLE, "", "", "", str(at), "20")))) == [("k", "v")]
    with cluster.connect(lane=ADMIN_LANE, timeout=5) as admin:
        admin.revoke("open", "*", ["safe-time"])
        for moment in ("", str(at)):
            with pytest.raises(NotAuthorized):
                stock.body(View("rows", (TABLE, "", "", "", moment, "20")))
            with pytest.raises(NotAuthorized):
                stock.body(View("versions", (TABLE, "k", moment)))


def test_a_replica_that_is_opened_while_all_are_closed_is_closed(
    client: anabranch.Client, stock: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = client.replica
    opened: list[Any] = []

    def meanwhile(*tables: str, **how: Any) -> Any:
        opened.append(replica(*tables, **how))
        thread = threading.Thread(target=stock.close)
        thread.start()
        thread.join()
        return opened[0]

    monkeypatch.setattr(client, "replica", meanwhile)
    with pytest.raises(NotReady, match="ends"):
        stock._replicas().rows(TABLE, prefix=None, first=None, at=None, limit=1, timeout=5.0)
    with pytest.raises(AnabranchError, match="the replica is closed"):
        opened[0].snapshot()
    assert kept_by(stock) == {}


def test_pages_that_are_closed_open_no_replica(client: anabranch.Client, stock: Pages) -> None:
    stock.close()
    assert "the process ends" in stock.body(View("rows", (TABLE, "", "", "", "", "20")))


@pytest.mark.parametrize("when", ["opened", "read"])
def test_a_full_disk_is_said(
    client: anabranch.Client, stock: Pages, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(*_: object, **__: object) -> Any:
        raise TableError("No space left on device")

    write(client, TABLE, (b"k", b"v"))
    view = View("rows", (TABLE, "", "", "", "", "20"))
    if when == "opened":
        monkeypatch.setattr(client, "replica", full)
    else:
        stock.body(view)
        monkeypatch.setattr(TableSnapshot, "scan", full)
    assert "No space left on device" in stock.body(view)
    assert kept_by(stock) == {}
