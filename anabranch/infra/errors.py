"""Errors of the embedded broker. Their base classes say what a caller should do, as in `anabranch.errors`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from anabranch.errors import AnabranchError, FixCallError, RetryError


class InfraError(AnabranchError):
    """Base of the errors of `anabranch.infra`."""


class DownloadFailed(InfraError, RetryError):
    """A file of the broker could not be fetched; the message names it and the cause."""

    to_do = "connect to the network, or set ANABRANCH_MAVEN_REPOSITORY to a Maven mirror, then repeat the command"


class HashMismatch(InfraError, FixCallError):
    """A fetched file is not the one that the lock file names; it was deleted.

    Causes: a proxy that answers with a page of its own, or a repository that was tampered with.
    """

    def __init__(self, file: str, expected: str, found: str) -> None:
        super().__init__(
            f"{file} has SHA-256 {found}, expected {expected}: the repository (or a proxy before "
            "it) served another file; nothing of it was kept"
        )
        self.file = file
        self.expected = expected
        self.found = found


class CacheBusy(InfraError, RetryError):
    """Another process holds the cache's lock until after the deadline."""


class NoJava(InfraError, FixCallError):
    """No Java of the needed version was found; the message lists what was tried."""


class PortTaken(InfraError, FixCallError):
    """The requested port is in use by another process."""

    to_do = "choose another port with --port or --http; 0: any free one"

    def __init__(self, port: int) -> None:
        super().__init__(f"port {port} is in use")
        self.port = port


class BrokerFailed(InfraError):
    """Base of the errors of a broker that does not run; ``log_tail`` has its log's last lines."""

    def __init__(
        self, message: str, *, log: Path | None = None, log_tail: Sequence[str] = ()
    ) -> None:
        if log is not None:
            message = f"{message}\nlast lines of {log}:\n" + "\n".join(f"  {e}" for e in log_tail)
        super().__init__(message)
        self.log = log
        self.log_tail = tuple(log_tail)


class BrokerDied(BrokerFailed):
    """The broker, or the formatting of its folder, ended by itself."""


class StartDeadlinePassed(BrokerFailed, RetryError):
    """The broker did not answer in time and was stopped."""


class BrokerNotRunning(BrokerFailed, FixCallError):
    """The call needs a running broker."""


class FolderInUse(InfraError, RetryError):
    """Another process uses the folder."""


class FolderUnusable(InfraError, FixCallError):
    """The folder can't be made or written to, or Kafka would misread its path."""


class FolderMismatch(InfraError, FixCallError):
    """The folder was made with other settings than the requested ones."""
