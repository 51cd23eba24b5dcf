"""Tokens for OAUTHBEARER: from a file, a callback, or an identity provider by client credentials (RFC 6749)."""

from __future__ import annotations

import base64
import json
import logging
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from anabranch.kafka.sasl import SaslError

log = logging.getLogger("anabranch.kafka")

_MOST_BYTES = 1 << 20
_ANSWER_S = 5.0  # the longest wait for a provider
_FRESH = 0.7  # a new token is requested after this part of the old one's life
_OPAQUE_S = 300.0
_AGAIN_S = 5.0  # … and again after this time without a new one


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A token file that another program updates: it is read for each authentication."""

    path: Path

    def __call__(self, deadline: float) -> str:
        """The token. Raises `OSError`: it is missing, or has expired."""
        return token_and_end(self.path)[0]


def token_and_end(path: Path, _: str = "") -> tuple[str, float]:
    """The token in a file, and when to read it again (Unix seconds): the answer of librdkafka's ``oauth_cb``.

    Raises `OSError`: it is missing, or has expired.
    """
    with path.open("rb") as file:
        token = _checked(file.read(_MOST_BYTES).strip(), str(path))
    try:
        body = token.split(".")[1]
        end = float(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))["exp"])
    except (ValueError, KeyError, TypeError, IndexError):
        return token, time.time() + _OPAQUE_S  # opaque: only the brokers know its end
    if end <= time.time():
        raise OSError(f"the token in {path} has ended")
    return token, end


@dataclass(frozen=True, slots=True)
class Token:
    """A token, when to request the next one, and when it expires: times of `time.monotonic`."""

    text: str = field(repr=False)
    ask_at: float
    ends_at: float


class KeptToken:
    """Caches a token for most of its life. Thread-safe."""

    def __init__(self, fetch: Callable[[float], Token]) -> None:
        """``fetch``: called with a number of seconds to get a new token; raises `OSError` or `SaslError`."""
        self._fetch = fetch
        self._lock = threading.Lock()
        self._token = Token("", 0.0, 0.0)

    def __call__(self, deadline: float) -> str:
        """A token. Raises `OSError` if none is available now, `SaslError` if the client is refused."""
        with self._lock:
            kept, now = self._token, time.monotonic()
            if now < kept.ask_at:
                return kept.text
            try:
                self._token = self._fetch(min(deadline, now + _ANSWER_S) - now)
            except OSError as error:
                if now >= kept.ends_at:
                    raise
                log.warning("no new token, the old one is used for as long as it lasts: %s", error)
                self._token = Token(kept.text, min(now + _AGAIN_S, kept.ends_at), kept.ends_at)
            return self._token.text


def answer_of(callback: Callable[[Any], Sequence[Any]], config: str | None) -> Sequence[Any]:
    """An answer of confluent-kafka's ``oauth_cb``: (token, end in Unix seconds, …).

    Raises `OSError`: it returns no token, or an expired one.
    """
    try:
        answer = tuple(callback(config))
        end = float(answer[1])
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise OSError(f"oauth_cb gives no token: {why}") from error
    if end <= time.time():
        raise OSError("oauth_cb gives a token that has ended")
    return answer


def of_callback(callback: Callable[[str], Sequence[Any]], config: str) -> KeptToken:
    """Tokens of confluent-kafka's ``oauth_cb``, which returns (token, end in Unix seconds, …)."""

    def fetch(_: float) -> Token:
        text, end = answer_of(callback, config)[:2]
        now, life = time.monotonic(), float(end) - time.time()
        return Token(_checked(str(text).encode(), "oauth_cb"), now + life * _FRESH, now + life)

    return KeptToken(fetch)


class ClientCredentials:
    """Asks an identity provider for a token."""

    def __init__(self, url: str, client: str, secret: str, scope: str, ca: str | None) -> None:
        """``ca``: file with the authorities for the provider's certificate. Raises `OSError`."""
        self._url = url
        self._basic = base64.b64encode(f"{client}:{secret}".encode()).decode()
        self._form = {"grant_type": "client_credentials"} | ({"scope": scope} if scope else {})
        self._tls = ssl.create_default_context(cafile=ca)

    def __call__(self, seconds: float) -> Token:
        """A new token. Raises `OSError`, or `SaslError` if the provider refuses the client."""
        asked = time.monotonic()
        form = urllib.parse.urlencode(self._form).encode()
        headers = {"Authorization": f"Basic {self._basic}", "Accept": "application/json"}
        https = urllib.request.HTTPSHandler(context=self._tls)
        try:
            request = urllib.request.Request(self._url, form, headers)
            with urllib.request.build_opener(https, _NoRedirect()).open(
                request, timeout=max(0.01, seconds)
            ) as answer:
                found = json.loads(answer.read(_MOST_BYTES))
                life = float(found.get("expires_in", 0))
                text = _checked(str(found["access_token"]).encode(), self._url)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (400, 401, 403):
                    raise SaslError(f"{self._url} refuses the client: {error.code}") from None
            raise OSError(f"{self._url} answers {error.code} {error.reason}") from None
        except (OSError, HTTPException) as error:
            raise OSError(f"{self._url} can't be asked for a token: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise OSError(f"{self._url} answers with no token") from None
        return Token(text, asked + life * _FRESH, asked + life)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so that the client's secret goes only to the given address."""

    def redirect_request(self, *_: object) -> None:
        return None


def _checked(token: bytes, source: str) -> str:
    """The token, if it has only legal characters, so that it can't end the field that contains it (RFC 6750)."""
    if not token or not all(0x21 <= byte <= 0x7E for byte in token):
        raise OSError(f"{source} holds no token")
    return token.decode("ascii")
