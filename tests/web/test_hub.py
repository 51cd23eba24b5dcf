"""The poller: once for all who look on, and only while somebody does."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from anabranch.errors import NotAuthorized, NotReady, UnknownStream, UnknownTransaction
from anabranch.web import app, hub
from anabranch.web.hub import Hub, View

STREAMS = View("streams")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "INTERVAL_S", 0.03)
    monkeypatch.setattr(hub, "WATCH_S", 0.03)
    monkeypatch.setattr(hub, "WAIT_S", 0.3)


def run(
    play: Callable[[Hub], Awaitable[None]],
    look: Callable[[View], str],
    sample: Callable[[], None] = lambda: None,
    sweep: Callable[[], None] = lambda: None,
) -> None:
    async def main() -> None:
        polled = Hub(look, sample, sweep)
        try:
            await play(polled)
        finally:
            polled.close()

    asyncio.run(main())


async def changes(page: hub.Page, count: int) -> None:
    for _ in range(count):
        await asyncio.wait_for(page.changed.wait(), 60)


def test_one_poll_for_all_viewers_and_none_without() -> None:
    asked: list[View] = []

    async def play(polled: Hub) -> None:
        with polled.watched(STREAMS) as one, polled.watched(STREAMS) as other:
            assert one is other
            await changes(one, 3)
            assert polled.looking == 2
            at_once = await asyncio.gather(*(polled.see(STREAMS) for _ in range(20)))
            assert {page.html for page in at_once} <= {
                f"body {len(asked) - 1}",
                f"body {len(asked)}",
            }
        assert len(asked) <= 6
        await asyncio.sleep(0.1)
        before = len(asked)
        await asyncio.sleep(0.2)
        assert (len(asked), polled.looking) == (before, 0)

    def look(view: View) -> str:
        asked.append(view)
        return f"body {len(asked)}"

    run(play, look)


def test_slow_answers_are_asked_for_more_seldom() -> None:
    times: list[float] = []

    async def play(polled: Hub) -> None:
        with polled.watched(STREAMS) as page:
            await changes(page, 2)

    def look(_view: View) -> str:
        times.append(time.monotonic())
        time.sleep(0.05)
        return ""

    run(play, look)
    assert times[1] - times[0] >= 0.05 * hub.SHARE


def test_a_poll_that_fails_shows_its_age_and_error_and_the_page_comes_back() -> None:
    fails: list[Exception] = []

    async def play(polled: Hub) -> None:
        with polled.watched(STREAMS) as page:
            await changes(page, 1)
            assert (page.html, page.trouble) == ("body", "")
            fails.append(NotReady("away"))
            await changes(page, 2)
            assert page.html == "body"
            assert re.fullmatch(r"NotReady: away. This is \d s old.", page.trouble)
            fails[:] = [ZeroDivisionError("oh")]
            await changes(page, 2)
            assert "defect" in page.trouble
            fails.clear()
            await changes(page, 2)
            assert page.trouble == ""

    def look(_view: View) -> str:
        if fails:
            raise fails[0]
        return "body"

    run(play, look)


@pytest.mark.parametrize(
    "error", [NotAuthorized("no"), UnknownStream("gone"), UnknownTransaction("gone")], ids=str
)
def test_a_page_that_may_not_be_seen_any_more_is_dropped(error: Exception) -> None:
    fails: list[Exception] = []

    async def play(polled: Hub) -> None:
        with polled.watched(STREAMS) as page:
            await changes(page, 1)
            assert page.html == "body"
            fails.append(error)
            await changes(page, 2)
            assert page.trouble == f"{type(error).__name__}: {error}."
            assert not page.html
            assert json.loads(app._told(page))["html"] == "", "open browsers lose it, too"

    def look(_view: View) -> str:
        if fails:
            raise fails[0]
        return "body"

    run(play, look)


def test_a_cluster_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    async def play(polled: Hub) -> None:
        first = replace(await polled.see(STREAMS))
        assert first.html is None
        assert "NotReady: the cluster has not answered" in first.trouble
        monkeypatch.setattr(hub, "WAIT_S", 30.0)
        answers.set()
        page = await polled.see(STREAMS)
        assert (page.html, page.trouble) == ("late", "")

    def look(_view: View) -> str:
        answers.wait(30)
        return "late"

    run(play, look)


def test_what_the_lane_may_not_see_any_more_is_dropped() -> None:
    refused: list[Exception] = []

    async def play(polled: Hub) -> None:
        with polled.watched(STREAMS) as page:
            await changes(page, 1)
            assert json.loads(app._told(page))["html"] == "secret"
            refused.append(NotAuthorized("no right"))
            await changes(page, 2)
            assert page.html is None
            assert json.loads(app._told(page))["html"] == ""

    def look(_view: View) -> str:
        if refused:
            raise refused[0]
        return "secret"

    run(play, look)


def test_samples_are_taken_without_viewers_and_survive_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "SAMPLE_S", 0.02)
    taken: list[str] = []

    async def play(polled: Hub) -> None:
        assert taken == []
        polled.begin()
        while len(taken) < 3:
            await asyncio.sleep(0.01)

    def sample() -> None:
        taken.append(threading.current_thread().name)
        raise ZeroDivisionError

    run(play, lambda _view: "", sample)
    assert set(taken) == {"anabranch-web-sample_0"}


def test_pages_that_read_delay_no_others() -> None:
    reads = threading.Event()

    async def play(polled: Hub) -> None:
        reading = asyncio.create_task(polled.see(View("events", ("shop/orders",))))
        assert (await polled.see(STREAMS)).html == "streams"
        reads.set()
        assert (await reading).html == "events"

    def look(view: View) -> str:
        if view.kind == "events":
            reads.wait(10)
        return view.kind

    run(play, look)


def test_a_slow_search_delays_no_other_live_page() -> None:
    goes = threading.Event()

    async def play(polled: Hub) -> None:
        with (
            polled.watched(View("events", ("shop/orders",))) as slow,
            polled.watched(STREAMS) as quick,
        ):
            await changes(quick, 3)
            assert slow.html is None
            goes.set()
            await changes(slow, 1)

    def look(view: View) -> str:
        if view.kind == "events":
            goes.wait(10)
        return view.kind

    run(play, look)


def test_live_pages_share_the_time_and_a_slow_one_takes_its_own() -> None:
    """One page takes 60 ms, one nothing: the slow one is made each 600 ms, the other each 30 ms."""
    made: list[str] = []

    async def play(polled: Hub) -> None:
        with polled.watched(View("slow")), polled.watched(View("quick")):
            await asyncio.sleep(0.9)

    def look(view: View) -> str:
        made.append(view.kind)
        if view.kind == "slow":
            time.sleep(0.06)
        return ""

    run(play, look)
    assert made.count("slow") <= 2
    assert made.count("quick") >= 5


def test_quick_pages_are_polled_at_the_same_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what they have in common is asked for once."""
    monkeypatch.setattr(hub, "WATCH_S", 0.6)
    times: dict[str, list[float]] = {"a": [], "b": []}

    async def play(polled: Hub) -> None:
        with polled.watched(View("a")) as first:
            await changes(first, 2)
            await asyncio.sleep(0.3)  # half the time between two polls
            with polled.watched(View("b")):
                await changes(first, 2)

    def look(view: View) -> str:
        times[view.kind].append(time.monotonic())
        return ""

    run(play, look)
    later = times["b"][1:]
    assert later
    assert all(min(abs(at - other) for other in times["a"]) < 0.15 for at in later)


def test_a_page_that_browsers_show_is_not_polled_for_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page that nobody shows is polled once it is older than a second."""
    monkeypatch.setattr(hub, "WATCH_S", 60.0)
    made: list[View] = []

    async def play(polled: Hub) -> None:
        with polled.watched(STREAMS) as page:
            await changes(page, 1)
            await asyncio.sleep(2 * hub.INTERVAL_S)
            assert (await polled.see(STREAMS)) is page
            assert len(made) == 1
        await polled.see(STREAMS)
        assert len(made) == 2

    def look(view: View) -> str:
        made.append(view)
        return ""

    run(play, look)


def test_a_sweep_that_waits_for_a_search_delays_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SAMPLE_S", 0.02)
    ends = threading.Event()
    taken: list[None] = []

    async def play(polled: Hub) -> None:
        polled.begin()
        until = time.monotonic() + 5
        while len(taken) < 3 and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert len(taken) >= 3
        ends.set()

    def sweep() -> None:
        ends.wait(10)

    run(play, lambda _view: "", lambda: taken.append(None), sweep)


def test_pages_past_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MOST_LOOKING", 2)
    monkeypatch.setattr(hub, "MOST_PAGES", 3)

    async def play(polled: Hub) -> None:
        with polled.watched(STREAMS), polled.watched(STREAMS):
            with pytest.raises(NotReady, match="browsers look on"), polled.watched(STREAMS):
                pass
            for number in range(10):  # of those that none looks at, the oldest goes
                await polled.see(View("stream", (str(number),)))
            assert len(polled._pages) == 3
        with (
            polled.watched(View("a")),
            polled.watched(View("b")),
            pytest.raises(NotReady, match="pages are open"),
        ):
            await asyncio.gather(*(polled.see(View("c", (str(n),))) for n in range(5)))

    run(play, lambda view: str(view))


@pytest.mark.parametrize("way", ["stuck", "gone"])
def test_a_browser_that_is_stuck_or_gone_is_dropped(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(app, "SEND_S", 0.1)
    sent: list[dict[str, Any]] = []
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if way == "stuck" and len(sent) > 3:
            await asyncio.Event().wait()

    def news() -> list[str | None]:
        return [json.loads(m["body"][6:])["html"] for m in sent[1:] if m["body"][:4] == b"data"]

    async def play(polled: Hub) -> None:
        live = asyncio.create_task(app._Live(polled, STREAMS)({}, receive, send))
        while len(news()) < 2:
            await asyncio.sleep(0.01)
        if way == "gone":
            left.set()
        await asyncio.wait_for(live, 60)
        assert polled.looking == 0

    number = iter(range(1000))
    run(play, lambda _view: f"body {next(number)}")
    assert news()[:2] in ([None, "body 0"], ["body 0", "body 1"])
