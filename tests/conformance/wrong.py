"""Clients with one planted error each, for the conformance kit: ``python -m tests.conformance.wrong NAME``.

Each is the Python client with one thing changed. `ERRORS` names the scenario that has to find it, and the rule.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from anabranch.client import session
from anabranch.client.receipts import WriterAccount
from anabranch.client.session import Session
from anabranch.conformance.checks import read_topic
from anabranch.conformance.child import to_bytes, to_text
from anabranch.conformance.python_client import Operations, main
from anabranch.errors import (
    AnabranchError,
    MalformedRecord,
    OutcomeUnknown,
    TransactionAborted,
    UnsupportedVersion,
    WriteFailed,
)
from anabranch.kafka.log import KafkaLog
from anabranch.librdkafka.command_bus import KafkaBus
from anabranch.librdkafka.journal_writer import KafkaJournal
from anabranch.librdkafka.options import Options
from anabranch.protocol.ids import control_partition_of, made_ms_of, make_txn_id
from anabranch.protocol.limits import MAX_WAIT_MS
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, decode_as, encode
from anabranch.protocol.tokens import narrow
from anabranch.topics.names import stream_topic

IMPATIENT_S = 1.5
HOUR_MS = 3_600_000


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
        return lambda self, command, deadline, **how: commit(
            self, replace(command, own=(), receipts=()), deadline, **how
        )

    patch(Session, "try_commit", make)


def _with_extents(change: Callable[[r.Extent], r.Extent]) -> None:
    """Change the extents of all receipts of finished writers."""

    def make(receipt: Any) -> Any:
        def changed(self: WriterAccount, **arguments: Any) -> r.Receipt:
            made: r.Receipt = receipt(self, **arguments)
            if not made.finished:
                return made
            return replace(made, extents=tuple(change(extent) for extent in made.extents))

        return changed

    patch(WriterAccount, "receipt", make)


@error("R9.1", "begin-write-commit")
def sums_are_wrong() -> None:
    _with_extents(lambda extent: replace(extent, crc_sum=extent.crc_sum + 1))


@error("R9.2", "begin-write-commit")
def extents_end_early() -> None:
    _with_extents(lambda extent: replace(extent, end=extent.end - 1))


@error("R9.3", "begin-write-commit")
def sequences_begin_at_zero() -> None:
    def make(receipt: Any) -> Any:
        def changed(self: WriterAccount, **arguments: Any) -> r.Receipt:
            made: r.Receipt = receipt(self, **arguments)
            return replace(made, sequence=made.sequence - 1)

        return changed

    patch(WriterAccount, "receipt", make)


@error("R9.4", "begin-write-commit")
def receipts_have_no_time() -> None:
    def make(ask: Any) -> Any:
        def changed(self: Session, partition: int, command: Any, *more: Any, **how: Any) -> Any:
            if isinstance(command, r.Register):
                command = replace(command, receipt=replace(command.receipt, seen=0))
            if isinstance(command, r.Commit):
                own = tuple(replace(receipt, seen=0) for receipt in command.own)
                command = replace(command, own=own)
            return ask(self, partition, command, *more, **how)

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
        def changed(self: Session, partition: int, command: Any, payload: bytes, *more: Any) -> Any:
            copy = new_copy(self, partition, command, payload, *more)
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
        return lambda self, partition, command, payload, *more: new_copy(
            self, partition, command, payload, *more
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
    def changed(
        self: Session, txn_id: bytes, command: Any, token: Any, deadline: float, **_: Any
    ) -> Any:
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
        def changed(self: Session, *arguments: Any, **how: Any) -> Any:
            try:
                return until_known(self, *arguments, **how)
            except OutcomeUnknown:
                raise TransactionAborted("no answer in time") from None

        return changed

    patch(Session, "_until_known", make)


# -- framing and placing commands -------------------------------------------------------------------------


@error("R2.1", "begin-write-commit")
def commands_are_longer() -> None:
    vars(session)["encode"] = lambda command: encode(command) + b"\0"


@error("R2.2", "broken-answers")
def takes_a_broken_reply_for_a_refusal() -> None:
    def make(receive: Any) -> Any:
        def changed(self: Session, *arguments: Any) -> Any:
            try:
                return receive(self, *arguments)
            except (MalformedRecord, UnsupportedVersion):
                return r.Refusal("TransactionAborted", "not a reply")

        return changed

    patch(Session, "_receive", make)


@error("R3.2", "begin-write-commit")
def names_a_partition_that_is_not_there() -> None:
    sent: set[bytes] = set()

    def make(produce: Any) -> Any:
        def changed(self: KafkaBus, command: Any) -> None:
            name, right = self._reply_header
            if command.correlation_id not in sent:
                self._reply_header = (name, (99).to_bytes(4, "big"))
            sent.add(command.correlation_id)
            produce(self, command)
            self._reply_header = (name, right)

        return changed

    patch(KafkaBus, "_produce", make)


@error("R3.4", "late-answers")
def stops_at_an_unexpected_reply() -> None:
    def make(take: Any) -> Any:
        def changed(self: KafkaBus, message: Any) -> None:
            if message.key() not in self._slots:
                vars(self)["_take_reply"] = lambda _: None
                return
            take(self, message)

        return changed

    patch(KafkaBus, "_take_reply", make)


def _without_idempotence(producer: str) -> None:
    patch(
        Options,
        producer,
        lambda config: lambda *given: config(*given) | {"enable.idempotence": False},
    )


@error("R3.8", "begin-write-commit")
def commands_are_not_idempotent() -> None:
    _without_idempotence("commands")


@error("R4.1", "begin-write-commit")
def all_commands_go_to_the_first_partition() -> None:
    vars(session)["control_partition_of"] = lambda _: 0
    vars(session)["make_txn_id"] = lambda partition, *more: make_txn_id(partition + 1, *more)


@error("R5.1", "begin-write-commit")
def ids_are_of_another_hour() -> None:
    vars(session)["make_txn_id"] = lambda partition, ms, random: make_txn_id(
        partition, ms - HOUR_MS, random
    )


# -- names, ends and writers ------------------------------------------------------------------------------


@error("R5.5", "names")
def a_committed_name_is_an_error() -> None:
    def make(begin: Any) -> Any:
        def changed(self: Operations, *arguments: Any, **more: Any) -> Any:
            answer = begin(self, *arguments, **more)
            if "outcome" in answer:
                raise TransactionAborted("the name is taken")
            return answer

        return changed

    patch(Operations, "begin", make)


def _swallows(operation: str) -> None:
    def make(call: Any) -> Any:
        def changed(self: Operations, *arguments: Any, **more: Any) -> Any:
            try:
                return call(self, *arguments, **more)
            except AnabranchError:
                return {}

        return changed

    patch(Operations, operation, make)


@error("R5.7", "begin-write-commit")
def writes_after_the_end_seem_to_succeed() -> None:
    _swallows("write")


@error("R6.2", "begin-write-commit")
def writes_by_another_epoch() -> None:
    def make(touch: Any) -> Any:
        def changed(self: Session, *arguments: Any) -> Any:
            found = touch(self, *arguments)
            return replace(found, stream_epoch=found.stream_epoch + 1)

        return changed

    patch(Session, "touch", make)


@error("R8.1", "begin-write-commit")
def records_have_their_header_twice() -> None:
    def make(write: Any) -> Any:
        def changed(self: KafkaJournal, *given: Any) -> None:
            *place, headers, timestamp = given
            write(self, *place, [*headers, headers[-1]], timestamp)

        return changed

    patch(KafkaJournal, "write", make)


@error("R8.3", "begin-write-commit")
def journals_are_not_idempotent() -> None:
    _without_idempotence("journal")


@error("R8.4", "join")
def the_first_join_has_a_fixed_number() -> None:
    joined: set[str] = set()

    def make(join: Any) -> Any:
        def changed(self: Operations, token: str) -> Any:
            with pytest.MonkeyPatch.context() as patched:
                if token not in joined:
                    patched.setattr(Session, "random64", lambda _: 4711)
                joined.add(token)
                return join(self, token)

        return changed

    patch(Operations, "join", make)


@error("R8.5", "reserved-headers")
def renames_reserved_headers() -> None:
    def make(write: Any) -> Any:
        def changed(self: Operations, txn: str, events: list[dict[str, Any]]) -> Any:
            for event in events:
                event["headers"] = [[name.replace("ab.", "x."), v] for name, v in event["headers"]]
            return write(self, txn, events)

        return changed

    patch(Operations, "write", make)


@error("R8.6", "write-in-doubt")
def commits_what_it_called_failed() -> None:
    allowed_s = 0.0

    def patient(connect: Any) -> Any:
        def changed(self: Operations, bootstrap: str, prefix: str, timeout_ms: int) -> Any:
            nonlocal allowed_s
            allowed_s = timeout_ms / 1000
            return connect(self, bootstrap, prefix, 5 * timeout_ms)

        return changed

    def make(write: Any) -> Any:
        def changed(self: Operations, **arguments: Any) -> Any:
            began = time.monotonic()
            answer = write(self, **arguments)
            if time.monotonic() - began > allowed_s:
                raise WriteFailed("not acknowledged in time")
            return answer

        return changed

    patch(Operations, "connect", patient)
    patch(Operations, "write", make)


@error("R8.7", "plain-writes")
def plain_records_have_a_reserved_header() -> None:
    def make(plain: Any) -> Any:
        def changed(self: Operations, stream: str, events: list[dict[str, Any]]) -> Any:
            for event in events:
                event["headers"].append(["ab.mine", to_text(b"x")])
            return plain(self, stream, events)

        return changed

    patch(Operations, "plain", make)


# -- commits and aborts -----------------------------------------------------------------------------------


@error("R10.2", "begin-write-commit")
def lets_the_controller_wait_too_long() -> None:
    def make(ask: Any) -> Any:
        def changed(self: Session, partition: int, command: Any, *more: Any, **how: Any) -> Any:
            if isinstance(command, r.Commit):
                command = replace(command, wait_ms=MAX_WAIT_MS + 1)
            return ask(self, partition, command, *more, **how)

        return changed

    patch(Session, "try_ask", make)


@error("R10.4", "quotas")
def a_refusal_ends_all_transactions() -> None:
    def make(begin: Any) -> Any:
        def changed(self: Operations, **arguments: Any) -> Any:
            try:
                return begin(self, **arguments)
            except AnabranchError:
                for name in self._handles:
                    self.abort(name)
                raise

        return changed

    patch(Operations, "begin", make)


@error("R10.5", "abort")
def a_second_abort_is_an_error() -> None:
    aborted: set[str] = set()

    def make(abort: Any) -> Any:
        def changed(self: Operations, txn: str) -> Any:
            if txn in aborted:
                raise TransactionAborted("it is aborted already")
            aborted.add(txn)
            return abort(self, txn)

        return changed

    patch(Operations, "abort", make)


@error("R10.6", "numbers")
def numbers_are_left_out() -> None:
    def make(commit: Any) -> Any:
        return lambda self, **arguments: commit(self, **(arguments | {"number": None}))

    patch(Operations, "commit", make)


@error("R10.7", "prepared")
def names_the_secret_itself() -> None:
    def make(commit: Any) -> Any:
        def changed(self: Session, command: Any, deadline: float, **how: Any) -> Any:
            if command.prepare is not None:
                command = replace(command, prepare=replace(command.prepare, by=bytes(32)))
            return commit(self, command, deadline, **how)

        return changed

    patch(Session, "try_commit", make)


@error("R10.9", "decided")
def a_decision_is_reported_without_its_transaction() -> None:
    def make(_: Any) -> Any:
        return lambda self, txn: {
            "outcome": {**self.commit(txn, None, None, None)["outcome"], "committed": 0}
        }

    patch(Operations, "commit_decided", make)


@error("R10.10", "sessions")
def all_rows_after_a_refused_one_are_reported() -> None:
    def make(session: Any) -> Any:
        def changed(self: Operations, events: list[Any]) -> Any:
            failed = session(self, events)["failed"]
            return {"failed": list(range(min(failed), len(events)))}

        return changed

    patch(Operations, "session", make)


@error("R10.8", "prepared")
def decides_without_the_secret() -> None:
    def make(decide: Any) -> Any:
        return lambda self, txn_id, secret, commit: decide(self, txn_id, None, commit)

    patch(Operations, "decide", make)


@error("R13.1", "reading")
def reads_what_is_aborted() -> None:
    def make(_: Any) -> Any:
        return lambda self, stream: {"events": uncommitted(self._bootstrap, stream)}

    patch(Operations, "read", make)


@error("R13.2", "reading")
def gives_all_events_the_last_time() -> None:
    def make(read: Any) -> Any:
        def changed(self: Operations, stream: str) -> Any:
            answer = read(self, stream)
            last = max(event["commit_timestamp"] for event in answer["events"])
            for event in answer["events"]:
                event["commit_timestamp"] = last
            return answer

        return changed

    patch(Operations, "read", make)


def uncommitted(bootstrap: str, stream: str) -> list[dict[str, Any]]:
    """All records of a stream's topic."""
    with closing(KafkaLog(bootstrap)) as log:
        records = [one[1] for one in read_topic(log, stream_topic(stream), committed=False)]
    return [
        {
            "key": to_text(record.key),
            "value": to_text(record.value),
            "headers": [],
            "timestamp": record.timestamp_ms,
            "commit_timestamp": None,
        }
        for record in records
    ]


@error("R11.6", "unknown-code")
def every_refusal_is_tried_again() -> None:
    def make(receive: Any) -> Any:
        def changed(self: Session, *arguments: Any) -> Any:
            answer = receive(self, *arguments)
            return replace(answer, code="NotReady") if isinstance(answer, r.Refusal) else answer

        return changed

    patch(Session, "_receive", make)


if __name__ == "__main__":
    ERRORS[sys.argv[1]].plant()
    main(Operations())
