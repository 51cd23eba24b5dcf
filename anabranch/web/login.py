"""Users: by a header of a proxy, or by a password file, whose lines `password_line` makes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Protocol

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from anabranch.errors import InvalidArgument

log = logging.getLogger("anabranch.web")

# These paths need no user, as they show nothing of the cluster.
_OPEN_PATH = "/health"
_OPEN_FOLDER = "/static/"
_REMEMBERED_S = 300.0  # a right password is not hashed again until it was not sent for this long
_MOST_REMEMBERED = 1000
_WARNED_S = 1.0  # between two lines of the log about wrong passwords
_MOST_WAITING = 64  # passwords that wait for their turn to be hashed
_GUESSES = 10  # wrong passwords of an address at once; then one a second
_GUESS_S = 1.0
_MOST_GUESSERS = 10_000  # addresses whose wrong passwords are counted
THIS_MACHINE = ("127.0.0.0/8", "::1")
_USER = re.compile(r"[^\x00-\x1f\x7f:]{1,100}")
# The parameters of scrypt: a password takes 16 MiB and some 50 ms.
_LOG_N = 14
_BLOCK = 8
_PARALLEL = 1
_BYTES = 32
_FORM = "USER:scrypt$N$R$P$SALT$HASH"


def address(peer: str, headers: Headers) -> str:
    """The address of a request's sender, and the address that a proxy names, for the log."""
    behind = headers.get("x-forwarded-for")
    return f"{peer} for {behind[:200]!r}" if behind else peer


class TooManyGuesses(Exception):
    """The address has sent too many wrong passwords."""


class Login(Protocol):
    """Finds the user of a request."""

    challenge: str  # for the header WWW-Authenticate; empty: browsers can't ask for a password

    def known(self, peer: str, headers: Headers) -> str | None:
        """The user, if that needs no hashing; empty if the request is refused; None if `user_of` has to decide.

        Raises: TooManyGuesses.
        """

    def user_of(self, peer: str, headers: Headers) -> str:
        """The user; empty if the request is refused. May take some tenths of a second."""


class Proxies:
    """Addresses and networks of proxies."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Raises: InvalidArgument."""
        try:
            self._networks = [ipaddress.ip_network(each, strict=False) for each in texts]
        except ValueError as error:
            raise InvalidArgument(f"--proxy: {error}") from error

    def have(self, peer: str) -> bool:
        at = _ip(peer)
        return at is not None and any(at in each for each in self._networks)

    def sender(self, peer: str, headers: Headers) -> str:
        """The address, or IPv6 network, that sent a request. If a proxy sent it: the last address that it names.

        A proxy appends the address that it has seen to the addresses that the sender wrote itself.
        """
        named = ",".join(headers.getlist("x-forwarded-for")).rpartition(",")[2]
        at = (_ip(named.strip()) if self.have(peer) else None) or _ip(peer)
        if isinstance(at, ipaddress.IPv6Address):  # one sender has all addresses of such a network
            return str(ipaddress.ip_network((at, 64), strict=False))
        return str(at or peer)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        at = ipaddress.ip_address(text)
    except ValueError:
        return None
    # How a socket of both families names IPv4 addresses.
    return getattr(at, "ipv4_mapped", None) or at


class HeaderLogin:
    """The user that a proxy names in a header of each request."""

    challenge = ""

    def __init__(self, header: str, proxies: Sequence[str]) -> None:
        """``proxies``: addresses or networks whose header counts. Raises: InvalidArgument."""
        if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", header):
            raise InvalidArgument(f"--user-header {header!r:.80}: the name of a header")
        self._header = header
        self._proxies = Proxies(proxies)

    def known(self, peer: str, headers: Headers) -> str:
        return self.user_of(peer, headers)

    def user_of(self, peer: str, headers: Headers) -> str:
        found = headers.getlist(self._header)
        if len(found) != 1 or not _USER.fullmatch(found[0].strip()):
            return ""
        return found[0].strip() if self._proxies.have(peer) else ""


class PasswordLogin:
    """Users with passwords, by HTTP's basic authentication."""

    challenge = 'Basic realm="anabranch", charset="UTF-8"'

    def __init__(self, file: Path, proxies: Sequence[str] = THIS_MACHINE) -> None:
        """``file``: lines of `password_line`; it is read again when it changes.

        ``proxies``: addresses or networks that name the sender of a request. Raises: InvalidArgument.
        """
        self._file = file
        self._proxies = Proxies(proxies)
        self._stamp: tuple[int, int] | None = None
        self._warned = -math.inf
        self._key = secrets.token_bytes(32)
        # Digest of right credentials -> until when. The ones that were sent last are at the end.
        self._remembered: dict[bytes, float] = {}
        self._guesses = _Guesses()
        self._lock = Lock()  # guards the fields; nothing is hashed while it is held
        self._nobody = password_line("nobody", secrets.token_hex(16)).partition(":")[2]
        try:
            self._lines = _lines_of(file)
        except (OSError, UnicodeDecodeError, InvalidArgument) as error:
            raise InvalidArgument(f"--password-file {file}: {error}") from error
        if not self._lines:
            raise InvalidArgument(
                f"{file} has no user: add a line of `anabranch web-password USER`"
            )

    def known(self, peer: str, headers: Headers) -> str | None:
        user, password = _credentials(headers.get("authorization", ""))
        if not user:
            return ""
        with self._lock:
            self._read()
            if self._is_remembered(self._digest(user, password)):
                return user
            self._guesses.take(self._proxies.sender(peer, headers))
        return None

    def user_of(self, peer: str, headers: Headers) -> str:
        user, password = _credentials(headers.get("authorization", ""))
        if not user:
            return ""
        with self._lock:
            self._read()
            line, digest = self._lines.get(user), self._digest(user, password)
            if self._is_remembered(digest):  # another request with the same credentials was first
                return user
        # An unknown user takes as much time as a wrong password.
        is_right = _is_right(line or self._nobody, password) and _USER.fullmatch(user)
        with self._lock:
            if line is None or not is_right:
                self._warn(user, peer, headers)
                return ""
            self._guesses.give_back(self._proxies.sender(peer, headers))
            self._remember(digest)
            return user

    def _is_remembered(self, digest: bytes) -> bool:
        """Whether these credentials were right not long ago. If so, they are remembered again."""
        if self._remembered.get(digest, 0.0) <= time.monotonic():
            return False
        self._remember(digest)
        return True

    def _remember(self, digest: bytes) -> None:
        self._remembered.pop(digest, None)
        while len(self._remembered) >= _MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[digest] = time.monotonic() + _REMEMBERED_S

    def _digest(self, user: str, password: str) -> bytes:
        """The digest of credentials and of the user's line, so that a new line makes them unknown."""
        told = f"{self._lines.get(user, self._nobody)}\0{user}\0{password}"
        return hmac.digest(self._key, told.encode(), "sha256")

    def _warn(self, user: str, peer: str, headers: Headers) -> None:
        now = time.monotonic()
        if now - self._warned >= _WARNED_S:
            self._warned = now
            log.warning("a wrong login: %r at %s", user[:100], address(peer, headers))

    def _read(self) -> None:
        """Read the file if it has changed. Without the file there are no users; a wrong line changes no user."""
        try:
            stat = self._file.stat()
            stamp = stat.st_mtime_ns, stat.st_size
            if stamp == self._stamp:
                return
            self._stamp = stamp
            found, why = _lines_of(self._file), "it has no user"
        except OSError as error:
            self._stamp = None  # so that the same file is read again once it is back
            found, why = {}, str(error)
        except (UnicodeDecodeError, InvalidArgument) as error:
            log.warning("the password file is as it was before: %s", error)
            return
        if self._lines and not found:
            log.warning("the password file %s lets no user in: %s", self._file, why)
        self._lines = found


class _Guesses:
    """Counts the wrong passwords of each address: some at once are allowed, then one a second."""

    def __init__(self) -> None:
        # Address -> when its next guess is due if it guesses evenly. Addresses that guessed last are at the end.
        self._due: dict[str, float] = {}

    def take(self, sender: str) -> None:
        """Count a guess. Raises: TooManyGuesses."""
        now = time.monotonic()
        due = max(now, self._due.get(sender, now))
        if due - now > (_GUESSES - 1) * _GUESS_S:
            raise TooManyGuesses
        self._due.pop(sender, None)
        while len(self._due) >= _MOST_GUESSERS:
            del self._due[next(iter(self._due))]
        self._due[sender] = due + _GUESS_S

    def give_back(self, sender: str) -> None:
        """Take back a guess that was right."""
        if sender in self._due:
            self._due[sender] -= _GUESS_S


def _lines_of(file: Path) -> dict[str, str]:
    """User -> the rest of the line. Raises: InvalidArgument, OSError."""
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        user, _, rest = line.strip().partition(":")
        if not user or user.startswith("#"):
            continue
        if _parts(rest) is None or user in found:
            raise InvalidArgument(
                f"{file}, line {number}: not {_FORM}, or a second line of a user: `anabranch web-password USER` "
                "makes lines"
            )
        found[user] = rest
    return found


def password_line(user: str, password: str) -> str:
    """A line of a password file. Raises: InvalidArgument."""
    if not _USER.fullmatch(user) or user.startswith("#"):
        raise InvalidArgument(
            f"user {user!r:.100}: 1 to 100 characters, no colon, no control character"
        )
    if not password:
        raise InvalidArgument("the password is empty")
    salt = os.urandom(16)
    found = _hashed(password, salt, _LOG_N, _BLOCK, _PARALLEL)
    texts = (base64.b64encode(each).decode() for each in (salt, found))
    return f"{user}:scrypt${_LOG_N}${_BLOCK}${_PARALLEL}${'$'.join(texts)}"


def _hashed(password: str, salt: bytes, log_n: int, block: int, parallel: int) -> bytes:
    most = 256 * block << log_n
    given = password.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(
        given, salt=salt, n=1 << log_n, r=block, p=parallel, maxmem=most, dklen=_BYTES
    )


def _parts(rest: str) -> tuple[int, int, int, bytes, bytes] | None:
    """The parts of a line after the user; None if it has another form, or would take too much memory."""
    fields = rest.split("$")
    if len(fields) != 6 or fields[0] != "scrypt" or not all(each.isdigit() for each in fields[1:4]):
        return None
    try:
        log_n, block, parallel = (int(each[:3]) for each in fields[1:4])
        salt, found = (base64.b64decode(each, validate=True) for each in fields[4:])
    except ValueError:  # digits such as "²", or no base64
        return None
    fits = 10 <= log_n <= 18 and 1 <= block <= 16 and 1 <= parallel <= 4 and len(found) == _BYTES
    return (log_n, block, parallel, salt, found) if fits else None


def _is_right(rest: str, password: str) -> bool:
    parts = _parts(rest)
    if parts is None:
        return False
    log_n, block, parallel, salt, found = parts
    return hmac.compare_digest(_hashed(password, salt, log_n, block, parallel), found)


def _credentials(authorization: str) -> tuple[str, str]:
    """User and password of a request; empty if it has none."""
    kind, _, rest = authorization.partition(" ")
    if kind.lower() != "basic" or len(rest) > 1000:
        return "", ""
    try:
        user, _, password = base64.b64decode(rest, validate=True).decode("utf-8").partition(":")
    except ValueError:
        return "", ""
    return user, password


class Doorkeeper:
    """ASGI middleware that refuses requests without a user. The user is ``scope["state"]["user"]``."""

    def __init__(self, app: ASGIApp, login: Login) -> None:
        self._app = app
        self._login = login
        self._waiting = 0
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="anabranch-web-login")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_open = path == _OPEN_PATH or path.startswith(_OPEN_FOLDER)
        answer: ASGIApp = self._app
        if scope["type"] == "http" and not is_open:
            answer = await self._answer(scope)
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope) -> ASGIApp:
        """The application, if the request has a user; else a response that refuses the request."""
        peer = scope["client"][0] if scope.get("client") else ""
        headers = Headers(scope=scope)
        try:
            user = self._login.known(peer, headers)
        except TooManyGuesses:
            return PlainTextResponse(
                "too many wrong passwords: wait some seconds\n", 429, {"retry-after": "10"}
            )
        if user is None:
            if self._waiting >= _MOST_WAITING:
                return PlainTextResponse(
                    "too many logins at a time: try again\n", 503, {"retry-after": "5"}
                )
            user = await self._judged(peer, headers)
        if user:
            scope.setdefault("state", {})["user"] = user
            return self._app
        challenge = self._login.challenge
        told = (
            "log in"
            if challenge
            else "my proxy names no user: come by the proxy, or see --user-header"
        )
        return PlainTextResponse(
            f"{told}\n", 401, {"www-authenticate": challenge} if challenge else {}
        )

    async def _judged(self, peer: str, headers: Headers) -> str:
        """Find the user by hashing the password. One request at a time does this, so that guesses are slow."""
        loop = asyncio.get_running_loop()
        self._waiting += 1
        try:
            return await loop.run_in_executor(self._hashing, self._login.user_of, peer, headers)
        finally:
            self._waiting -= 1
