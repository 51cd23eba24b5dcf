"""The web application: routes of pages, their live updates, and actions that people confirm."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
    RetryError,
)
from anabranch.web.actions import Plan, plan
from anabranch.web.guard import Confirmations, Guard
from anabranch.web.hub import Hub, Page, View
from anabranch.web.pages import LIMITS, Pages, environment

log = logging.getLogger("anabranch.web")

SEND_S = 10.0  # a browser that takes no data for this long is dropped
BEAT_S = 15.0  # between comments in the stream of a live page that does not change
MOST_FORM_BYTES = 4096
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

    ``timeout``: seconds for a call of a poll.
    """

    client: Client
    cluster: str
    names: frozenset[str]
    allow_actions: bool
    timeout: float


def application(site: Site) -> ASGIApp:
    """The ASGI application. No request goes to the cluster before the first page."""
    return Guard(_Web(site).app(), site.names)


class _Web:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._templates: Environment = environment()
        self._pages = Pages(site.client, self._templates, site.timeout, acts=site.allow_actions)
        self.hub = Hub(self._pages.body)
        self._confirmations = Confirmations()
        self._actors = ThreadPoolExecutor(2, thread_name_prefix="anabranch-web-act")

    def app(self) -> Starlette:
        stream, txn = "/streams/{scope}/{name}", "/transactions/{txn}"
        pages: tuple[tuple[str, Callable[[Request], View]], ...] = (
            ("/", lambda _: View("overview")),
            ("/streams", lambda _: View("streams")),
            (stream, lambda r: View("stream", (_stream_of(r),))),
            ("/transactions", _transactions),
            (txn, lambda r: View("transaction", (r.path_params["txn"],))),
            ("/groups", lambda _: View("groups")),
            ("/controllers", lambda _: View("controllers")),
        )
        routes = [Route(path, self._page(view), methods=["GET"]) for path, view in pages]
        for path, about, actions in (
            (stream, _stream_of, ("scale", "delete")),
            (txn, lambda r: r.path_params["txn"], ("abort", "force")),
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
        yield
        self.hub.close()
        self._actors.shutdown(wait=False, cancel_futures=True)
        self._pages.close()

    # -- pages ----------------------------------------------------------------------------------------

    def _page(self, view_of: Callable[[Request], View]) -> Callable[[Request], Any]:
        async def page(request: Request) -> Response | _Live:
            view = view_of(request)
            if "text/event-stream" in request.headers.get("accept", ""):
                return _Live(self.hub, view)
            seen = await self.hub.see(view)
            if seen.html is None and seen.error is not None:
                raise seen.error
            return self._html(request, "page.html", body=Markup(seen.html), trouble=seen.trouble)

        return page

    async def _health(self, request: Request) -> Response:
        """For probes: 200 if the cluster answers, else 503."""
        seen = await self.hub.see(View("overview"))
        return PlainTextResponse(f"{seen.trouble or 'ok'}\n", 503 if seen.error else 200)

    def _html(
        self, request: Request, template: str, status: int = 200, **facts: Any
    ) -> HTMLResponse:
        path = request.url.path
        text = self._templates.get_template(template).render(
            cluster=self._site.cluster,
            acts=self._site.allow_actions,
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
        return self._html(request, "failed.html", status, told=told)

    # -- actions --------------------------------------------------------------------------------------

    def _action(self, action: str, about_of: Callable[[Request], str]) -> Callable[[Request], Any]:
        async def act(request: Request) -> Response:
            if not self._site.allow_actions:
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
            log.warning("%s: %s: %s: %s", _who(request), said, type(error).__name__, error)
            told = f"{type(error).__name__}: {error}"
            return self._html(request, "done.html", 409, told=told, back=back, failed=True)
        log.info("%s: %s: done: %s", _who(request), said, done)
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
            try:
                while not gone.done():
                    changed = asyncio.ensure_future(page.changed.wait())
                    news = _told(page)
                    await put(": alive\n\n" if news == said else f"data: {news}\n\n")
                    said = news
                    await asyncio.wait(
                        {gone, changed}, timeout=BEAT_S, return_when="FIRST_COMPLETED"
                    )
                    changed.cancel()
            except TimeoutError:
                log.warning("a browser took nothing for %g s: dropped", SEND_S)
            finally:
                gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _told(page: Page) -> str:
    return json.dumps({"html": page.html, "trouble": page.trouble})


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form. Raises: InvalidArgument (it is too big, or not a form)."""
    from urllib.parse import parse_qsl

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
    return 400 if isinstance(error, FixCallError) else 500


def _bound(action: str, about: str, given: dict[str, str], made: Plan) -> str:
    """The digest of an action and all that it will do: a confirmation is valid for this digest."""
    told = repr((action, about, sorted(given.items()), made.title, made.told))
    return hashlib.sha256(told.encode(errors="backslashreplace")).hexdigest()


def _who(request: Request) -> str:
    """The address of a request's sender, and the address that a proxy names."""
    peer = request.client.host if request.client else "?"
    behind = request.headers.get("x-forwarded-for")
    return f"{peer} for {behind[:200]!r}" if behind else peer


def _stream_of(request: Request) -> str:
    return f"{request.path_params['scope']}/{request.path_params['name']}"


def _transactions(request: Request) -> View:
    limit = request.query_params.get("limit", str(LIMITS[0]))
    if limit not in map(str, LIMITS):
        raise InvalidArgument(f"limit {limit[:20]!r}: one of {', '.join(map(str, LIMITS))}")
    return View("transactions", (request.query_params.get("scope", ""), limit))
