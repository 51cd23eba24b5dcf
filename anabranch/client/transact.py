"""`transact`: call a function with a transaction and commit, again and again until nothing is in the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from inspect import isasyncgen, isawaitable, iscoroutine, isgenerator
from typing import Protocol, Self, TypeVar

from anabranch.backoff import Backoff
from anabranch.client.row_turns import Turns
from anabranch.client.shared import Shared
from anabranch.errors import (
    AnabranchError,
    InvalidArgument,
    LocksBroken,
    RetryError,
    TransactionAborted,
    WriteFailed,
)
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import check_name
from anabranch.types import Result, Transacted

_LEAST_S = 0.05  # the least time in which `transact` begins or commits


class Repeatable(AbstractContextManager[object], Protocol):
    """The handle of a transaction that this process begins."""

    def __enter__(self) -> Self: ...

    @property
    def txn_id(self) -> bytes | None: ...

    def commit(self, *, name: str | None = None, timeout: float | None = None) -> Result: ...


H = TypeVar("H", bound=Repeatable)
V = TypeVar("V")


def transact(
    shared: Shared,
    begin: Callable[[float], H],
    function: Callable[[H], V],
    name: str | None,
    deadline: float,
    turns: Turns | None = None,
) -> Transacted[V]:
    """Call ``function`` with a new transaction and commit, until it commits or the deadline is over.

    ``begin``: makes the transaction; its argument limits its seconds. ``turns``: after locks broke at a row, the
    next try waits for a turn there. Raises: what the last try raised.
    """
    check_name(name)
    clock = shared.ports.clock
    pauses = Backoff(
        defaults.FIRST_TRANSACT_PAUSE_S,
        defaults.LONGEST_TRANSACT_PAUSE_S,
        clock,
        # So that conflicting clients do not retry together.
        jitter=lambda: shared.session.random64() % 1024 / 1024,
    )
    lost: AnabranchError | None = None
    try:
        while True:
            left = max(_LEAST_S, deadline - clock.monotonic())
            try:
                txn = begin(left)
            except RetryError as error:
                if shared.closed or lost is None:
                    raise
                raise lost from error
            try:
                with txn:
                    value = function(txn)
                    _check_called(value)
                    left = max(_LEAST_S, deadline - clock.monotonic())
                    result = txn.commit(name=name, timeout=left)
                    if turns is not None:
                        turns.committed(result.txn_id)
                    return Transacted(
                        *(getattr(result, f.name) for f in fields(result)), value=value
                    )
            except (LocksBroken, TransactionAborted, WriteFailed) as error:
                if txn.txn_id is None and not isinstance(error, LocksBroken):
                    raise  # raised by the function
                if not pauses.ends_by(deadline):
                    raise
                lost = error.with_traceback(None)
            if turns is None or not turns.take_after(lost, deadline):
                pauses.sleep()
    finally:
        if turns is not None:
            turns.give_up()


def _check_called(returned: object) -> None:
    """Raise `InvalidArgument` if the function is async or a generator: calling it has not run it."""
    if isawaitable(returned) or isgenerator(returned) or isasyncgen(returned):
        if iscoroutine(returned):
            returned.close()  # otherwise Python warns that it was never awaited
        raise InvalidArgument(
            "the function was not run: give a plain one, neither async nor a generator"
        )
