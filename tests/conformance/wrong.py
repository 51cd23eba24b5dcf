"""Clients with one planted error each, for the conformance kit: ``python -m tests.conformance.wrong NAME``.

Each is the Python client with one thing changed. `ERRORS` names the scenario that has to find it, and the rule.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from anabranch.client import session
from anabranch.client.session import Session
from anabranch.conformance.child import to_bytes, to_text
from anabranch.conformance.python_client import Operations, main
from anabranch.errors import OutcomeUnknown, TransactionAborted
from anabranch.librdkafka.command_bus import KafkaBus
from anabranch.protocol.ids import control_partition_of, made_ms_of, make_txn_id
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, decode_as, encode
from anabranch.protocol.tokens import narrow

IMPATIENT_S = 1.5


@dataclass(frozen=True)
class Planted:
    """An error. ``plant`` changes this process."""

    rule: str
    scenario: str
    plant: Callable[[], None]


ERRORS: dict[str, Planted] = {}


def error(rule: str, scenario: str) -> Callable[[Callable[[], None]], None]:
    """Add an error under the function's name."""

    def add(plant: Callable[[], None]) -> None:
        ERRORS[plant.__name__.replace("_", "-")] = Planted(rule, scenario, plant)

    return add


def patch(target: type, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a method by what ``make`` makes of it."""
    setattr(target, name, make(getattr(target, name)))


@error("R10.1", "begin-write-commit")
def commits_without_receipts() -> None:
    def make(commit: Any) -> Any:
        return lambda self, command, deadline: commit(
            self, replace(command, own=(), receipts=()), deadline
        )

    patch(Session, "try_commit", make)


@error("R9.1", "begin-write-commit")
def sums_are_wrong() -> None:
    def make(commit: Any) -> Any:
        def changed(self: Session, command: Any, deadline: float) -> Any:
            own = tuple(
                replace(
                    receipt,
                    extents=tuple(replace(e, crc_sum=e.crc_sum + 1) for e in receipt.extents),
                )
                for receipt in command.own
            )
            return commit(self, replace(command, own=own), deadline)

        return changed

    patch(Session, "try_commit", make)


@error("R9.4", "begin-write-commit")
def receipts_have_no_time() -> None:
    def make(ask: Any) -> Any:
        def changed(self: Session, partition: int, command: Any, *more: Any) -> Any:
            if isinstance(command, r.Register):
                command = replace(command, receipt=replace(command.receipt, seen=0))
            if isinstance(command, r.Commit):
                own = tuple(replace(receipt, seen=0) for receipt in command.own)
                command = replace(command, own=own)
            return ask(self, partition, command, *more)

        return changed

    patch(Session, "try_ask", make)


@error("R5.3", "begin-write-commit")
def macs_are_wrong() -> None:
    def make(token_of: Any) -> Any:
        def changed(self: Session, *arguments: Any) -> bytes:
            token = bytes(token_of(self, *arguments))
            return token[:-1] + bytes((token[-1] ^ 1,))

        return changed

    patch(Session, "token_of", make)


@error("R5.4", "join")
def joined_tokens_are_changed() -> None:
    def make(join: Any) -> Any:
        def changed(self: Operations, token: str) -> Any:
            until = 1000 * round(time.time() + 3600)
            return join(self, to_text(narrow(to_bytes(token) or b"", not_after_ms=until)))

        return changed

    patch(Operations, "join", make)


@error("R3.7", "not-ready")
def one_id_for_all_attempts() -> None:
    ids: dict[bytes, bytes] = {}

    def make(new_copy: Any) -> Any:
        def changed(self: Session, partition: int, command: Any, payload: bytes) -> Any:
            copy = new_copy(self, partition, command, payload)
            return copy._replace(correlation_id=ids.setdefault(payload, copy.correlation_id))

        return changed

    patch(Session, "_new_copy", make)


@error("R7.1", "begin-write-commit")
def segments_are_rotated() -> None:
    def make(touch: Any) -> Any:
        def changed(self: Session, token: bytes, stream: str, writer: int, deadline: float) -> Any:
            found = touch(self, token, stream, writer, deadline)
            partitions = [segment.partition for segment in found.segments]
            others = partitions[1:] + partitions[:1]
            pairs = zip(found.segments, others, strict=True)
            return replace(found, segments=tuple(replace(s, partition=p) for s, p in pairs))

        return changed

    patch(Session, "touch", make)


@error("R6.1", "begin-write-commit")
def touches_as_no_writer() -> None:
    def make(touch: Any) -> Any:
        return lambda self, token, stream, writer, deadline: touch(self, token, stream, 0, deadline)

    patch(Session, "touch", make)


@error("R5.2", "begin-write-commit")
def one_secret_for_all() -> None:
    patch(Session, "new_secret", lambda _: lambda self: bytes(range(32)))


@error("R3.1", "begin-write-commit")
def ids_can_be_guessed() -> None:
    numbers = itertools.count(1)

    def make(new_copy: Any) -> Any:
        return lambda self, partition, command, payload: new_copy(
            self, partition, command, payload
        )._replace(correlation_id=next(numbers).to_bytes(16, "big"))

    patch(Session, "_new_copy", make)


@error("R12.1", "begin-write-commit")
def sends_no_times() -> None:
    Session.seen = property(lambda self: [])  # type: ignore[assignment, method-assign]


@error("R8.2", "begin-write-commit")
def null_becomes_empty() -> None:
    def make(write: Any) -> Any:
        def changed(self: Operations, txn: str, events: list[dict[str, Any]]) -> Any:
            return write(self, txn, [event | {"value": event["value"] or ""} for event in events])

        return changed

    patch(Operations, "write", make)


@error("R10.3", "begin-write-commit")
def counts_are_made_up() -> None:
    def make(commit: Any) -> Any:
        def changed(self: Operations, **arguments: Any) -> Any:
            answer = commit(self, **arguments)
            answer["outcome"]["committed"] += 1
            return answer

        return changed

    patch(Operations, "commit", make)


@error("R5.6", "heartbeats")
def no_heartbeats() -> None:
    patch(Session, "beat", lambda _: lambda *_: [])


@error("R11.1", "lost-answers")
def repeats_at_once() -> None:
    vars(session)["FIRST_REPEAT_S"] = 0.2


@error("R3.3", "lost-answers")
def copies_differ() -> None:
    sent: set[bytes] = set()

    def make(send: Any) -> Any:
        def changed(
            self: KafkaBus, partition: int, cid: bytes, payload: bytes, more: Any = ()
        ) -> None:
            command = decode(payload)
            if cid in sent and isinstance(command, r.Commit):
                payload = encode(replace(command, wait_ms=command.wait_ms - 1))
            sent.add(cid)
            send(self, partition, cid, payload, more)

        return changed

    patch(KafkaBus, "send", make)


@error("R11.4", "lost-answers")
def a_new_transaction_after_a_timeout() -> None:
    def make(one_shot: Any) -> Any:
        def changed(self: Session, command: Any, deadline: float) -> Any:
            partition = control_partition_of(command.txn_id)
            answer = self.try_ask(partition, command, self.now() + IMPATIENT_S)
            if answer is not None:
                return answer
            made = make_txn_id(partition, made_ms_of(command.txn_id), self.random64())
            return one_shot(self, command._replace(txn_id=made), deadline)

        return changed

    patch(Session, "one_shot", make)


def _receive(*, checks: bool, keeps_all_times: bool) -> Callable[[Any], Any]:
    def make(_: Any) -> Any:
        def changed(
            self: Session, cid: bytes, digests: Collection[bytes], deadline: float, *more: Any
        ) -> Any:
            while (data := self._bus.wait(cid, deadline)) is not None:
                reply = decode_as(r.Reply, data)
                if reply.command in digests or not checks:
                    if keeps_all_times or not isinstance(reply.result, r.ScopeInfo):
                        self._raise(reply.hybrid_time)
                    return reply.result
            return None

        return changed

    return make


@error("R3.5", "stray-replies")
def believes_any_reply() -> None:
    patch(Session, "_receive", _receive(checks=False, keeps_all_times=False))


@error("R3.6", "outcomes-of-others")
def believes_outcomes_of_others() -> None:
    patch(Session, "_receive", _receive(checks=True, keeps_all_times=False))


@error("R12.2", "begin-write-commit")
def keeps_times_of_the_directory() -> None:
    patch(Session, "_receive", _receive(checks=True, keeps_all_times=True))


@error("R12.3", "former-leader")
def believes_a_former_leader() -> None:
    def lower(self: Session, timestamp: int) -> None:
        self.highest_timestamp = timestamp

    patch(Session, "_raise", lambda _: lower)


@error("R11.3", "refusal-of-a-copy")
def reports_the_refusal_of_a_copy() -> None:
    patch(Session, "_until_known", _never_resolves)


@error("R11.2", "unanswered-commit")
def never_resolves() -> None:
    patch(Session, "_until_known", _never_resolves)


def _never_resolves(_: Any) -> Any:
    def changed(self: Session, txn_id: bytes, command: Any, token: Any, deadline: float) -> Any:
        if token is not None:
            command = replace(command, wait_ms=1000)
        answer = self.try_ask(control_partition_of(txn_id), command, deadline)
        if answer is None:
            raise OutcomeUnknown("no answer in time")
        return answer

    return changed


@error("R11.5", "silence")
def takes_silence_for_an_abort() -> None:
    def make(until_known: Any) -> Any:
        def changed(self: Session, *arguments: Any) -> Any:
            try:
                return until_known(self, *arguments)
            except OutcomeUnknown:
                raise TransactionAborted("no answer in time") from None

        return changed

    patch(Session, "_until_known", make)


if __name__ == "__main__":
    ERRORS[sys.argv[1]].plant()
    main(Operations())
