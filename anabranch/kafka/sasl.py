"""SASL: a client's messages that prove its identity, and the checks of the answers. Bytes only, no socket.

An exchange is a generator: it yields messages to the broker, receives the broker's answers, and returns when the
broker has given the proof that the mechanism requires.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

Exchange = Generator[bytes, bytes, None]

SCRAM = ("SCRAM-SHA-256", "SCRAM-SHA-512")
# RFC 7677 requires at least 4,096. The upper bound limits what a false broker can cost: half a second.
_ITERATIONS = range(4_096, 1_000_001)
_SERVER_FIRST = re.compile(
    r"r=(?P<nonce>[!-+\--~]+),s=(?P<salt>[^,]+),i=(?P<count>[1-9][0-9]{0,8})(,.*)?"
)
_NO_BINDING = b"n,,"


class SaslError(Exception):
    """The other side refuses, or does not prove that it knows the password. Its text has no secret."""


class Mechanism(Protocol):
    """A SASL mechanism: a way to prove an identity."""

    @property
    def name(self) -> str:
        """The mechanism's name for brokers."""

    @property
    def principal(self) -> str:
        """The identity that is proved, for messages."""

    @property
    def secret(self) -> str:
        """A text that no message may show, not even the broker's; empty if the broker never gets it."""

    def exchange(self, deadline: float) -> Exchange:
        """The steps of one authentication. ``deadline``: by `time.monotonic`.

        Raises: SaslError (the broker refuses, or does not prove who it is), OSError (no token could be fetched).
        """


@dataclass(frozen=True, slots=True)
class Plain:
    """RFC 4616: the password as it is."""

    principal: str
    secret: str = field(repr=False)
    name: str = "PLAIN"

    def exchange(self, deadline: float) -> Exchange:
        """Send one message. The broker proves nothing."""
        yield f"\0{self.principal}\0{self.secret}".encode()


@dataclass(frozen=True, slots=True)
class Scram:
    """RFC 5802, 7677: neither side sends the password. Passwords are UTF-8 without SASLprep, as in Kafka."""

    name: str
    principal: str
    secret: str = field(repr=False)
    make_nonce: Callable[[], str] = field(default=lambda: secrets.token_urlsafe(24), repr=False)

    def exchange(self, deadline: float) -> Exchange:
        """Send two messages. `SaslError` unless the broker also knows the password."""
        algorithm = self.name.removeprefix("SCRAM-").replace("-", "").lower()

        def mac(key: bytes, text: bytes) -> bytes:
            return hmac.digest(key, text, algorithm)

        own = self.make_nonce()
        user = self.principal.replace("=", "=3D").replace(",", "=2C")
        first = f"n={user},r={own}".encode()
        server_first = yield _NO_BINDING + first
        nonce, salt, count = _server_first(server_first, own)
        salted = hashlib.pbkdf2_hmac(algorithm, self.secret.encode(), salt, count)
        bare = b"c=" + base64.b64encode(_NO_BINDING) + b",r=" + nonce.encode()
        said = b",".join((first, server_first, bare))
        client_key = mac(salted, b"Client Key")
        signature = mac(hashlib.new(algorithm, client_key).digest(), said)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        server_final = yield bare + b",p=" + base64.b64encode(proof)
        wanted = b"v=" + base64.b64encode(mac(mac(salted, b"Server Key"), said))
        if not hmac.compare_digest(server_final.partition(b",")[0], wanted):
            raise SaslError("the broker does not prove that it knows the password")


def _server_first(message: bytes, own: str) -> tuple[str, bytes, int]:
    """Nonce, salt and iterations."""
    found = _SERVER_FIRST.fullmatch(message.decode("utf-8", "replace"))
    if found is None:
        raise SaslError("the broker's first message is not one of SCRAM")
    nonce, count = found["nonce"], int(found["count"])
    if not nonce.startswith(own) or nonce == own:
        raise SaslError("the broker's nonce does not continue ours")
    if count not in _ITERATIONS:
        raise SaslError(
            f"the broker asks for {count} iterations; {_ITERATIONS[0]:,} to {_ITERATIONS[-1]:,} are allowed"
        )
    try:
        return nonce, base64.b64decode(found["salt"], validate=True), count
    except ValueError:
        raise SaslError("the broker's salt is no base64") from None


@dataclass(frozen=True, slots=True)
class OAuthBearer:
    """RFC 7628: an issued token. ``token``: called with a deadline for each authentication."""

    principal: str
    token: Callable[[float], str] = field(repr=False)
    extensions: Mapping[str, str] = field(default_factory=dict, repr=False)
    name: str = "OAUTHBEARER"
    secret: str = ""

    def exchange(self, deadline: float) -> Exchange:
        """Send one message; after a refusal, a second message to get the reason. Raises the errors of ``token``."""
        pairs = {"auth": f"Bearer {self.token(deadline)}", **self.extensions}
        text = "".join(f"{key}={value}\x01" for key, value in pairs.items())
        problem = yield _NO_BINDING + b"\x01" + text.encode() + b"\x01"
        if problem:
            yield b"\x01"  # the broker waits for this before it ends the exchange
            raise SaslError(f"the broker takes no such token: {_status(problem)}")


def _status(problem: bytes) -> str:
    try:
        return str(json.loads(problem)["status"])[:100]
    except (ValueError, KeyError, TypeError):
        return "it does not say why"
