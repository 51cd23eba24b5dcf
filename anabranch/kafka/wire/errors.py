"""Errors of one connection."""

from __future__ import annotations


class ConnectionBroken(Exception):
    """The connection failed, or its deadline passed: requests in flight may have been carried out or not.

    ``sent`` is False if no byte of the request can have reached the broker.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class MalformedAnswer(ConnectionBroken):
    """An answer that breaks the protocol, treated like a missing one."""


class AuthenticationFailed(ConnectionBroken):
    """The broker refuses the client's identity, or the client the broker's: trying again is useless."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=False)
