"""One poller for all browsers: it makes each page once for all that show it, and takes samples for the charts."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from anabranch.errors import AnabranchError, NotAuthorized, NotReady, UnknownStream

log = logging.getLogger("anabranch.web")
T = TypeVar("T")

INTERVAL_S = 1.0  # the greatest age of a page that is loaded, and that no browser shows
WATCH_S = 2.0  # between two polls of a page that a browser shows
SAMPLE_S = 10.0  # between two samples for the charts
SHARE = 5  # polls of all pages together take at most a fifth of the time (1 / SHARE)
MOST_PAGES = 64
MOST_LOOKING = 200
READING = frozenset(("events", "rows", "versions"))  # kinds of pages that read events and rows
WAIT_S = 5.0  # the longest that a page load waits for a poll


class View(NamedTuple):
    """The identity of a page: its kind, and the thing that it shows."""

    kind: str
    about: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class Page:
    """A page as of its last poll.

    ``html``: its body as of monotonic second ``at``; None before the first successful poll. ``error``: of the
    newest poll, if that failed. ``looking``: how many browsers show it live. ``took``: seconds of the newest poll,
    without its wait for the thread. ``changed``: set at the end of the next poll. ``follower``: polls the page
    while browsers show it.
    """

    view: View
    html: str | None = None
    at: float = 0.0
    error: AnabranchError | None = None
    looking: int = 0
    polled: float = -INTERVAL_S
    took: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    poll: asyncio.Task[None] | None = None
    follower: asyncio.Task[None] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether what it showed does not exist any more, or the lane may not see it.

        UnknownTransaction is a NotAuthorized.
        """
        return isinstance(self.error, NotAuthorized | UnknownStream)

    @property
    def trouble(self) -> str:
        """Why the page is not current; empty if it is."""
        if self.error is None:
            return ""
        old = f" This is {time.monotonic() - self.at:,.0f} s old." if self.html is not None else ""
        return f"{type(self.error).__name__}: {self.error}.{old}"


class Hub:
    """Polls pages while browsers show them. Everything but ``make`` and ``sample`` runs in one event loop."""

    def __init__(
        self,
        make: Callable[[View], str],
        sample: Callable[[], None] = lambda: None,
        sweep: Callable[[], None] = lambda: None,
    ) -> None:
        """``make``: makes the body of a page, in a thread: one makes the pages of `READING`, another the rest.

        ``sample``: takes a sample for the charts; called every `SAMPLE_S` from `begin` on, in a thread of its own.
        ``sweep``: closes what is idle; called as often, in the thread of the pages of `READING`.
        """
        self._make = make
        self._sample = sample
        self._sweep = sweep
        self._pages: dict[View, Page] = {}
        # Reading events and rows may take seconds, and delays no other page.
        self._threads = {
            name: ThreadPoolExecutor(1, thread_name_prefix=f"anabranch-web-{name}")
            for name in ("poll", "read", "sample")
        }
        self._repeating: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Begin to take samples, and to sweep. Pages are polled without it, too."""
        for thread, call in (("sample", self._sample), ("read", self._sweep)):
            self._repeating.append(asyncio.create_task(self._repeat(thread, call)))

    @property
    def looking(self) -> int:
        """How many browsers show live pages."""
        return sum(page.looking for page in self._pages.values())

    async def see(self, view: View) -> Page:
        """A page for a browser that loads it, or the page's ``error``. Raises: NotReady (too many pages).

        A page that other browsers show is as old as there; another one is at most a second old.
        """
        page = self._page(view)
        if time.monotonic() - page.polled >= (WATCH_S if page.looking else INTERVAL_S):
            poll = self._poll(page)
            await asyncio.wait({poll}, timeout=WAIT_S)
            if not poll.done() and page.error is None:
                page.error = NotReady(f"the cluster has not answered for {WAIT_S:g} s")
        return page

    @contextmanager
    def watched(self, view: View) -> Iterator[Page]:
        """A page that is polled during the block. Raises: NotReady (too many browsers show live pages)."""
        if self.looking >= MOST_LOOKING:
            raise NotReady(f"{MOST_LOOKING} browsers look on: close some")
        page = self._page(view)
        page.looking += 1
        if page.follower is None or page.follower.done():
            page.follower = asyncio.create_task(self._follow(page))
        try:
            yield page
        finally:
            page.looking -= 1

    def close(self) -> None:
        """End the polling. A call under way ends by itself."""
        followers = [one.follower for one in self._pages.values() if one.follower is not None]
        for task in (*followers, *self._repeating):
            task.cancel()
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def _page(self, view: View) -> Page:
        if view not in self._pages and len(self._pages) >= MOST_PAGES:
            idle = [one for one in self._pages.values() if not one.looking and one.poll is None]
            if not idle:
                raise NotReady(f"{MOST_PAGES} pages are open: close some")
            del self._pages[min(idle, key=lambda one: one.polled).view]
        return self._pages.setdefault(view, Page(view))

    async def _follow(self, page: Page) -> None:
        """Poll a page while browsers show it. A slow page is polled less often, and the others as before."""
        while page.looking:
            if (left := self._due(page) - time.monotonic()) > 0:
                await asyncio.sleep(left)
            else:
                await asyncio.wait({self._poll(page)})

    def _due(self, page: Page) -> float:
        """The monotonic second of a page's next poll."""
        shown = sum(1 for one in self._pages.values() if one.looking)
        slowly = SHARE * shown * page.took
        if slowly > WATCH_S:
            return page.polled - page.took + slowly
        # Pages are polled at the same moments, because they ask for parts of the same lists.
        return WATCH_S * (math.floor(page.polled / WATCH_S) + 1)

    async def _repeat(self, thread: str, call: Callable[[], None]) -> None:
        """Make a call in a thread every `SAMPLE_S`; less often if it takes long."""
        while True:
            began = time.monotonic()
            _, error = await self._called(thread, call)
            if error is not None:
                log.warning("the thread %s: %s", thread, error)
            took = time.monotonic() - began
            await asyncio.sleep(max(SAMPLE_S - took, SHARE * took))

    def _poll(self, page: Page) -> asyncio.Task[None]:
        if page.poll is None:
            page.poll = asyncio.create_task(self._ask(page))
        return page.poll

    async def _ask(self, page: Page) -> None:
        thread = "read" if page.view.kind in READING else "poll"
        html, page.error = await self._called(thread, partial(self._timed, page))
        if page.error is None:
            page.html, page.at = html, time.monotonic()
        elif page.is_gone:
            page.html = None
        page.polled, page.poll = time.monotonic(), None
        page.changed.set()
        page.changed = asyncio.Event()

    def _timed(self, page: Page) -> str:
        """Make a page's body, in a thread."""
        began = time.monotonic()
        try:
            return self._make(page.view)
        finally:
            page.took = time.monotonic() - began

    async def _called(
        self, thread: str, call: Callable[[], T]
    ) -> tuple[T | None, AnabranchError | None]:
        """The result of a call in a thread, or its error."""
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads[thread], call), None
        except AnabranchError as error:
            return None, error
        except Exception as error:
            log.exception("a call of the thread %s", thread)
            return None, AnabranchError(f"a defect, please report it: {error!r}")
