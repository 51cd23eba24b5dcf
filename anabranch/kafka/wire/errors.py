"""Errors of one connection."""

from __future__ import annotations


class ConnectionBroken(Exception):
    """The connection failed, or its deadline passed: requests in flight may have been done or not.

    ``sent`` is False if no byte of the request can have reached the broker.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class MalformedAnswer(ConnectionBroken):
    """An answer that breaks the protocol: as good as none."""


class AuthenticationFailed(ConnectionBroken):
    """The broker refuses our identity, or we refuse the broker's: to try again is of no use."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=False)
