"""Guards of the web process: the host names it answers to, forms only from its own pages, headers for browsers.

`docs/web.md` says which attack each of them prevents.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONFIRM_S = 600.0  # how long a confirmation page is valid
LOCAL = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With no-referrer, browsers would send the Origin of our own forms as null.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware that refuses foreign requests, and adds `HEADERS` to each response."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """``names``: host names, without ports, to which requests may be addressed."""
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refused = self.refusal(scope["method"], Headers(scope=scope))
        if refused:
            await PlainTextResponse(refused + "\n", 403)(scope, receive, guarded)
        else:
            await self._app(scope, receive, guarded)

    def refusal(self, method: str, headers: Headers) -> str:
        """Why a request is refused; empty if it is allowed."""
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else ""
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if name.lower() not in self._names:
            return f"host {name[:100]!r} is not one of mine: start me with --host-name for it"
        site = headers.get("sec-fetch-site")
        if method in ("GET", "HEAD"):
            navigates = headers.get("sec-fetch-mode") == "navigate"
            foreign = site in ("cross-site", "same-site") and not navigates
            wrong = "other sites may link to my pages, and use them for nothing else"
            return wrong if foreign else ""
        if method != "POST":
            return f"method {method[:20]}: I know GET, HEAD and POST"
        origin = urlsplit(headers.get("origin") or headers.get("referer") or "")
        # The form may come over https if a proxy says so, or if the request names another host than this machine.
        proxied = headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
        schemes = ("http",) if name.lower() in LOCAL else ("http", "https")
        own = origin.netloc == host and origin.scheme in ((proxied,) if proxied else schemes)
        if site not in (None, "same-origin") or not own:
            return "the form is not of my own pages: nothing was done"
        return ""


class Confirmations:
    """Secrets of confirmation pages: each is valid for one action, once, for ten minutes, in this process.

    Secrets are signed, not stored: requests for new secrets can't make earlier secrets invalid.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._used: dict[str, float] = {}  # used secret -> when it expires

    def give(self, what: str) -> str:
        """A new secret for an action. ``what``: a digest of all that it will do."""
        until, nonce = time.monotonic() + CONFIRM_S, secrets.token_hex(16)
        return self._sealed(f"{what}.{until:.3f}.{nonce}")

    def action_of(self, secret: str) -> str:
        """The digest of the action that the secret was made for; empty if the secret is not valid."""
        head = secret.rpartition("/")[0]
        if not hmac.compare_digest(self._sealed(head).encode(), secret.encode()):
            return ""
        what, _, until = head.partition(".")
        is_late = float(until.rpartition(".")[0]) < time.monotonic()
        return "" if is_late or secret in self._used else what

    def use(self, secret: str) -> None:
        now = time.monotonic()
        self._used = {each: end for each, end in self._used.items() if end >= now}
        self._used[secret] = now + CONFIRM_S

    def _sealed(self, head: str) -> str:
        return f"{head}/{hmac.new(self._key, head.encode(), 'sha256').hexdigest()}"
