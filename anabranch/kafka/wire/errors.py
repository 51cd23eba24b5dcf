"""What can go wrong with one connection."""

from __future__ import annotations


class ConnectionBroken(Exception):
    """The connection failed, or its deadline passed: what was in flight may have been done or not.

    ``sent`` is False if no byte of the request can have reached the broker.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class MalformedAnswer(ConnectionBroken):
    """An answer that is not what the protocol says: as good as none."""


class AuthenticationFailed(ConnectionBroken):
    """The broker does not take us for whom we say we are, or the other way round: to try again is of no use."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=False)
