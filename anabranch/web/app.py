"""The web application: routes of pages, their live updates, and actions that people confirm."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from jinja2 import Environment
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from anabranch.client.client import Client
from anabranch.errors import (
    AnabranchError,
    Expired,
    FixCallError,
    InvalidArgument,
    NotAuthorized,
    RetryError,
)
from anabranch.logs import escaped
from anabranch.protocol.ids import parse_txn_text
from anabranch.protocol.legal_names import split_stream
from anabranch.web.actions import Plan, plan
from anabranch.web.charts import Recorder
from anabranch.web.guard import Confirmations, Guard
from anabranch.web.hub import READING, Hub, Page, View
from anabranch.web.login import Doorkeeper, Login, address
from anabranch.web.pages import COUNTS, LIMITS, EventsAsked, Pages, Showing, environment, rendered

log = logging.getLogger("anabranch.web")

SEND_S = 10.0  # a browser that takes no data for this long is dropped
LIVE_S = 300.0  # then a live page ends: the browser connects, and is checked and logged, again
BEAT_S = 15.0  # between comments in the stream of a live page that does not change
MOST_FORM_BYTES = 4096
# Headers of proxies, and their beginning.
PROXIED = frozenset(("forwarded", "via", "x-real-ip", "x-client-ip", "cf-connecting-ip"))
FORWARDED = "x-forwarded-"
MOST_FIELD = 1000  # characters
MOST_LOGGED = 300  # characters of a text in the log
SHOWN = ("open", "finished", "prepared")  # kinds of transactions
NAVIGATION = (
    ("/", "Overview"),
    ("/streams", "Streams"),
    ("/transactions", "Transactions"),
    ("/groups", "Groups and processors"),
    ("/controllers", "Controllers"),
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Site:
    """Parts of the web application. ``cluster``: its name on the page. ``names``: host names that it answers to.

    ``timeout``: seconds for a call of a poll. ``login``: finds the user of each request; None: there are no users.
    """

    client: Client
    cluster: str
    names: frozenset[str]
    timeout: float
    showing: Showing
    login: Login | None = None


def application(site: Site) -> ASGIApp:
    """The ASGI application, which asks controllers for a sample every `hub.SAMPLE_S`, and else for pages only."""
    app: ASGIApp = _Web(site).app()
    if site.login is not None:
        app = Doorkeeper(app, site.login)
    return Guard(app, site.names)


class _Web:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._templates: Environment = environment()
        recorder = Recorder(site.client, site.timeout)
        self._pages = Pages(site.client, self._templates, site.timeout, site.showing, recorder)
        self.hub = Hub(self._pages.body, recorder.sample, self._pages.sweep)
        self._confirmations = Confirmations()
        self._actors = ThreadPoolExecutor(2, thread_name_prefix="anabranch-web-act")

    def app(self) -> Starlette:
        stream, txn = "/streams/{scope}/{name}", "/transactions/{txn}"
        pages: tuple[tuple[str, Callable[[Request], View]], ...] = (
            ("/", lambda _: View("overview")),
            ("/streams", _streams),
            (stream, lambda r: View("stream", (_stream_of(r),))),
            (f"{stream}/events", _events),
            (f"{stream}/rows", _rows),
            (f"{stream}/versions", _versions),
            ("/transactions", _transactions),
            (txn, lambda r: View("transaction", (r.path_params["txn"],))),
            ("/groups", lambda r: View("groups", (_query(r, "q")["q"],))),
            ("/processors/{scope}/{name}", lambda r: View("processor", (_stream_of(r),))),
            ("/controllers", lambda r: View("controllers", (_query(r, "q")["q"],))),
        )
        routes = [Route(path, self._page(view), methods=["GET"]) for path, view in pages]
        for path, about, actions in (
            (stream, _stream_of, ("scale", "delete")),
            (txn, _txn_of, ("abort", "force")),
        ):
            routes += [
                Route(f"{path}/{action}", self._action(action, about), methods=["GET", "POST"])
                for action in actions
            ]
        return Starlette(
            routes=[
                *routes,
                Route("/health", self._health, methods=["GET"]),
                Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
            ],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: self._failed, AnabranchError: self._failed},
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.hub.begin()
        yield
        self.hub.close()
        self._actors.shutdown(wait=False, cancel_futures=True)
        self._pages.close()

    # -- pages ----------------------------------------------------------------------------------------

    def _page(self, view_of: Callable[[Request], View]) -> Callable[[Request], Any]:
        async def page(request: Request) -> Response | _Live:
            view = view_of(request)
            follows = "text/event-stream" in request.headers.get("accept", "")
            if view.kind in READING:
                does = "follows" if follows else "looks at"
                log.info("%s %s %s %s", _who(request), does, view.kind, _cut(view.about))
                if self._site.login is None and _is_proxied(request):
                    raise NotAuthorized(
                        "this comes by a proxy, and I find no users: start me with --user-header or --password-file"
                    )
            if follows:
                return _Live(self.hub, view)
            seen = await self.hub.see(view)
            if seen.html is None and seen.error is not None:
                raise seen.error
            return self._html(request, "page.html", body=Markup(seen.html), trouble=seen.trouble)

        return page

    async def _health(self, request: Request) -> Response:
        """For probes: 200 if the cluster answers, else 503. With a login, it does not say why."""
        seen = await self.hub.see(View("overview"))
        if seen.error is not None:
            return PlainTextResponse(
                "not ready\n" if self._site.login else f"{seen.trouble}\n", 503
            )
        return PlainTextResponse("ok\n")

    def _html(
        self, request: Request, template: str, status: int = 200, **facts: Any
    ) -> HTMLResponse:
        path = request.url.path
        text = rendered(
            self._templates,
            template,
            cluster=self._site.cluster,
            acts=self._site.showing.acts,
            user=_user(request),
            navigation=[
                (at, name, path == at or (at != "/" and path.startswith(f"{at}/")))
                for at, name in NAVIGATION
            ],
            **facts,
        )
        return HTMLResponse(text, status)

    async def _failed(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            status, told = error.status_code, f"{error.status_code}: {error.detail}"
        else:
            status = _status_of(error)
            told = f"{type(error).__name__}: {error}"
        if self._site.login is not None and not _user(request):  # on an open path
            return PlainTextResponse("not ready\n" if status == 503 else f"{status}\n", status)
        return self._html(request, "failed.html", status, told=told)

    # -- actions --------------------------------------------------------------------------------------

    def _action(self, action: str, about_of: Callable[[Request], str]) -> Callable[[Request], Any]:
        async def act(request: Request) -> Response:
            if not self._site.showing.acts:
                raise HTTPException(
                    403, "actions are disabled: start `anabranch web` with --allow-actions"
                )
            about, back = about_of(request), request.url.path.rpartition("/")[0]
            if request.method != "POST":
                given = dict(request.query_params)
                made = await self._in_thread(lambda: plan(self._site.client, action, about, given))
                secret = self._confirmations.give(_bound(action, about, given, made))
                return self._html(
                    request, "confirm.html", plan=made, back=back, secret=secret, given=given
                )
            return await self._do(request, action, about, back)

        return act

    async def _do(self, request: Request, action: str, about: str, back: str) -> Response:
        given = await _form(request)
        secret = given.pop("secret", "")
        said = f"{action} {about} {given or ''}".strip()
        try:
            made = None
            if self._confirmations.action_of(secret):
                made = await self._in_thread(lambda: plan(self._site.client, action, about, given))
            # Checked again, because the same form may have been sent twice meanwhile.
            agreed = self._confirmations.action_of(secret)
            if made is None or agreed != _bound(action, about, given, made):
                raise InvalidArgument(
                    "this confirmation was used already, is too old, or is for another state: nothing was done. "
                    "Go back and try again"
                )
            self._confirmations.use(secret)
            done = await self._in_thread(made.act)
        except AnabranchError as error:
            told = f"{type(error).__name__}: {error}"
            log.warning("%s: %s: %s", _who(request), said, _logged(told))
            return self._html(request, "done.html", 409, told=told, back=back, failed=True)
        log.info("%s: %s: done: %s", _who(request), said, _logged(done))
        gone = action == "delete"
        back = "/streams" if gone else back
        return self._html(request, "done.html", told=done, back=back, failed=False)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._actors, call)


class _Live:
    """A page as server-sent events. Each change sends only the newest text, so a slow browser misses some."""

    def __init__(self, hub: Hub, view: View) -> None:
        self._hub = hub
        self._view = view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(text: str) -> None:
            body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
            await asyncio.wait_for(send(body), SEND_S)

        with self._hub.watched(self._view) as page:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            gone = asyncio.ensure_future(_gone(receive))
            said = None
            until = time.monotonic() + LIVE_S
            try:
                while not gone.done() and (left := until - time.monotonic()) > 0:
                    changed = asyncio.ensure_future(page.changed.wait())
                    news = _told(page)
                    await put(": alive\n\n" if news == said else f"data: {news}\n\n")
                    said = news
                    await asyncio.wait(
                        {gone, changed}, timeout=min(BEAT_S, left), return_when="FIRST_COMPLETED"
                    )
                    changed.cancel()
                await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), SEND_S)
            except TimeoutError:
                log.warning("a browser took nothing for %g s: dropped", SEND_S)
            finally:
                gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _told(page: Page) -> str:
    return json.dumps({"html": "" if page.is_gone else page.html, "trouble": page.trouble})


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form. Raises: InvalidArgument (it is too big, or not a form)."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_FORM_BYTES:
            raise InvalidArgument(f"a form has at most {MOST_FORM_BYTES:,} bytes")
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=16))
    except ValueError as error:
        raise InvalidArgument(f"this is no form: {error}") from error


def _status_of(error: Exception) -> int:
    if isinstance(error, RetryError):
        return 503
    if isinstance(error, Expired):
        return 410
    if type(error).__name__.startswith("Unknown"):
        return 404
    if isinstance(error, NotAuthorized):
        return 403
    return 400 if isinstance(error, FixCallError) else 500


def _bound(action: str, about: str, given: dict[str, str], made: Plan) -> str:
    """The digest of an action and all that it will do: a confirmation is valid for this digest."""
    told = repr((action, about, sorted(given.items()), made.title, made.effects))
    return hashlib.sha256(told.encode(errors="backslashreplace")).hexdigest()


def _who(request: Request) -> str:
    """The user and the address of a request's sender, and the address that a proxy names."""
    found = address(request.client.host if request.client else "?", request.headers)
    user = _user(request)
    return f"{user!r} at {found}" if user else found


def _user(request: Request) -> str:
    """The user whom the login has found; empty without a login."""
    return str(getattr(request.state, "user", ""))


def _is_proxied(request: Request) -> bool:
    """Whether a request shows that a proxy sent it. Browsers don't speak HTTP/1.0; some proxies do."""
    names = request.headers.keys()
    return request.scope["http_version"] == "1.0" or any(
        name in PROXIED or name.startswith(FORWARDED) for name in names
    )


def _cut(about: tuple[str, ...]) -> str:
    """The thing that a page shows, and what is asked about it, for the log."""
    return " ".join([_logged(about[0]), *(repr(each[:200]) for each in about[1:] if each)])


def _logged(text: str) -> str:
    """A text of a browser for the log: it can't begin another line."""
    return escaped(text[:MOST_LOGGED])


def _stream_of(request: Request) -> str:
    """The stream of an address. Raises: InvalidArgument (it is not a stream's name)."""
    stream = f"{request.path_params['scope']}/{request.path_params['name']}"
    split_stream(stream)
    return stream


def _txn_of(request: Request) -> str:
    """The transaction of an address. Raises: InvalidArgument (it is not a transaction's id)."""
    return parse_txn_text(request.path_params["txn"]).hex()


def _query(request: Request, *names: str, **limits: tuple[int, ...]) -> dict[str, str]:
    """The fields of an address, in this order, empty if not given; bytes that are not UTF-8 as surrogates.

    ``limits``: the numbers that a field may have; the first one is the default. Raises: InvalidArgument.
    """
    text = request.scope["query_string"].decode("latin-1")
    try:
        given = dict(parse_qsl(text, errors="surrogateescape", max_num_fields=16))
    except ValueError as error:
        raise InvalidArgument(f"this address has too many fields: {error}") from error
    found = {name: given.get(name, "") for name in names}
    for name, value in found.items():
        if len(value) > MOST_FIELD:
            raise InvalidArgument(f"{name} has more than {MOST_FIELD:,} characters")
    for name, legal in limits.items():
        chosen = given.get(name, str(legal[0]))
        if chosen not in map(str, legal):
            raise InvalidArgument(f"{name} {chosen[:20]!r}: one of {', '.join(map(str, legal))}")
        found[name] = chosen
    return found


def _streams(request: Request) -> View:
    given = _query(request, "q", "state", limit=(LIMITS[1], *LIMITS))
    return View("streams", (given["q"], given["state"], given["limit"]))


def _events(request: Request) -> View:
    given = _query(request, "key", "q", "from", "commit", "txn", limit=(COUNTS[1], *COUNTS))
    return View("events", EventsAsked(_stream_of(request), *given.values()))


def _rows(request: Request) -> View:
    given = _query(request, "prefix", "from", "skip", "at", limit=(COUNTS[1], *COUNTS))
    return View("rows", (_stream_of(request), *given.values()))


def _versions(request: Request) -> View:
    given = _query(request, "key", "at")
    return View("versions", (_stream_of(request), given["key"], given["at"]))


def _transactions(request: Request) -> View:
    given = _query(request, "show", "scope", "state", "q", limit=LIMITS)
    given["show"] = given["show"] or SHOWN[0]
    if given["show"] not in SHOWN:
        raise InvalidArgument(f"show {given['show'][:20]!r}: one of {', '.join(SHOWN)}")
    return View("transactions", tuple(given.values()))
