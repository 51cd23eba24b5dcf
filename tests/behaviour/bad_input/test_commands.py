"""Commands that are not as they should be, and their tokens and receipts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from tests.behaviour.bad_input.place import SOON_S, WAIT_MS, Place
from tests.crash.raw import Refused, make_txn_id

pytestmark = pytest.mark.broker

NO_WRITER = b"\0" * 16


def with_token(kind: type, token: bytes, stream: str) -> object:
    receipt = r.Receipt(token[1:17].ljust(16), 7, 1, True, ())
    return {
        r.Touch: r.Touch(token, stream),
        r.Register: r.Register(token, receipt),
        r.Commit: r.Commit(token, (), None, None, WAIT_MS),
        r.Abort: r.Abort(token, ""),
        r.Heartbeat: r.Heartbeat((token,)),
    }[kind]


def flip(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


MALFORMED, UNKNOWN = "InvalidToken", "UnknownTransaction"
TAMPERINGS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "version": (lambda t: flip(t, 0), MALFORMED),
    "control partition": (lambda t: flip(t, 2), MALFORMED),
    "transaction": (lambda t: flip(t, 16), UNKNOWN),
    "keepalive": (lambda t: flip(t, 20), UNKNOWN),
    "begun": (lambda t: flip(t, 28), UNKNOWN),
    "scope": (lambda t: flip(t, 38), UNKNOWN),
    "rights": (lambda t: flip(t, -42), UNKNOWN),
    "end": (lambda t: flip(t, -34), "NotAuthorized"),
    "MAC": (lambda t: flip(t, -1), UNKNOWN),
    "number of caveats": (lambda t: flip(t, -33), MALFORMED),
    "cut short": (lambda t: t[:-1], MALFORMED),
    "made longer": (lambda t: t + b"\0", MALFORMED),
    "empty": (lambda t: b"", MALFORMED),
    "half": (lambda t: t[: len(t) // 2], MALFORMED),
}


def test_tampered_token(place: Place, subtests: pytest.Subtests) -> None:
    token = place.begin()
    kinds = (r.Touch, r.Register, r.Commit, r.Abort, r.Heartbeat)
    for what, (tamper, expected) in TAMPERINGS.items():
        commands = [with_token(kind, tamper(token), place.stream) for kind in kinds]
        codes = [getattr(answer, "code", answer) for answer in place.raw.ask_all(commands)]
        with subtests.test(what):
            first = ["NotAuthorized" if what == "rights" else expected] * 2
            assert codes == first + [expected] * 3
    assert place.state(token).state == "OPEN"
    assert place.raw.ask(r.Abort(token, "")).state == "ABORTED"


def change(receipt: r.Receipt, **changes: object) -> r.Receipt:
    return replace(receipt, extents=(replace(receipt.extents[0], **changes),))  # type: ignore[arg-type]


# A right receipt -> a wrong one, and how it is refused.
RECEIPTS: dict[str, tuple[Callable[[r.Receipt], r.Receipt], str]] = {
    "one more": (lambda x: change(x, count=x.extents[0].count + 1), "InvalidArgument"),
    "one less": (lambda x: change(x, count=x.extents[0].count - 1), "ReceiptMismatch"),
    "nothing": (lambda x: change(x, count=0, crc_sum=0), "ReceiptMismatch"),
    "checksum": (lambda x: change(x, crc_sum=x.extents[0].crc_sum ^ 1), "ReceiptMismatch"),
    "begins late": (lambda x: change(x, first=x.extents[0].first + 1), "InvalidArgument"),
    "ends early": (lambda x: change(x, end=x.extents[0].end - 1), "InvalidArgument"),
    "another writer": (lambda x: replace(x, writer=x.writer ^ 1), "ReceiptMismatch"),
    "not there yet": (lambda x: change(x, end=x.extents[0].end + 1000), "ReceiptsNotCovered"),
    "ends at 2^62": (lambda x: change(x, end=1 << 62), "ReceiptsNotCovered"),
    "of another": (lambda x: replace(x, txn_id=make_txn_id()), "InvalidArgument"),
    "twice": (lambda x: replace(x, extents=x.extents * 2), "InvalidArgument"),
    "back to front": (lambda x: change(x, first=9, end=8), "InvalidArgument"),
    "negative": (lambda x: change(x, first=-1), "InvalidArgument"),
    "fewer than none": (lambda x: change(x, count=-1), "InvalidArgument"),
    "another stream": (lambda x: change(x, stream="no/where"), "UnknownStream"),
    "no such partition": (lambda x: change(x, partition=99), "InvalidArgument"),
}


def test_wrong_receipt(place: Place, subtests: pytest.Subtests) -> None:
    """Refused, and the transaction is open as before: the right one commits it."""
    for what, (spoil, code) in RECEIPTS.items():
        with subtests.test(what):
            token, pen, touched = place.touched()
            pen.write(place.stream, touched.segments, [(b"k", b"one"), (b"k", b"two")])
            receipt = pen.receipt()
            with pytest.raises(Refused) as refused:
                place.raw.ask(r.Commit(token, (spoil(receipt),), None, None, 300))
            assert refused.value.code.startswith(code)
            assert place.state(token).state == "OPEN"
            better = replace(receipt, sequence=receipt.sequence + 1)
            outcome = place.raw.ask(r.Commit(token, (better,), (), None, WAIT_MS))
            assert (outcome.state, outcome.committed) == ("COMMITTED", 2)


# Bytes on the commands topic, with the two headers -> the code of the answer.
GARBAGE: dict[str, tuple[bytes, str]] = {
    "a version from the future": (
        b"\x02" + encode(r.GetState(NO_WRITER))[1:],
        "UnsupportedVersion",
    ),
    "a type from the future": (b"\x01\xc8" + NO_WRITER, "UnsupportedVersion"),
    "version zero": (b"\x00\x0b" + NO_WRITER, "UnsupportedVersion"),
    "nothing": (b"", "MalformedRecord"),
    "one byte": (b"\x01", "MalformedRecord"),
    "no body": (b"\x01\x0b", "MalformedRecord"),
    "a body too short": (encode(r.GetState(NO_WRITER))[:-1], "MalformedRecord"),
    "a body too long": (encode(r.GetState(NO_WRITER)) + b"\0", "MalformedRecord"),
    "a length of 2^60": (b"\x01\x01" + b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f", "MalformedRecord"),
    "a length below zero": (b"\x01\x01\x01", "MalformedRecord"),
    "text that is not UTF-8": (b"\x01\x01\x04\xff\xfe\x00", "MalformedRecord"),
    "a status row": (encode(r.ScopeRow("x", 0, "")), "MalformedRecord"),
    "a reply": (encode(r.Reply(b"", b"", 0, r.Registered(1))), "MalformedRecord"),
    "64 kB of noise": (b"\x01\x08" + bytes(range(256)) * 256, "MalformedRecord"),
}


def test_garbage_on_the_commands_topic(place: Place, subtests: pytest.Subtests) -> None:
    answers = place.raw.ask_all([payload for payload, _ in GARBAGE.values()])
    for answer, (what, (_, code)) in zip(answers, GARBAGE.items(), strict=True):
        with subtests.test(what):
            assert isinstance(answer, r.Refusal)
            assert answer.code == code


WRONG_HEADERS: dict[str, list[tuple[str, bytes]]] = {
    "none": [],
    "no partition": [("ab.cid", b"1" * 16)],
    "no correlation id": [("ab.reply", bytes(4))],
    "a partition that is not there": [("ab.cid", b"1" * 16), ("ab.reply", b"\x00\x00\x03\xe7")],
    "a negative partition": [("ab.cid", b"1" * 16), ("ab.reply", b"\xff\xff\xff\xff")],
    "a partition of three bytes": [("ab.cid", b"1" * 16), ("ab.reply", bytes(3))],
    "a partition of eight bytes": [("ab.cid", b"1" * 16), ("ab.reply", bytes(8))],
    "an empty correlation id": [("ab.cid", b""), ("ab.reply", bytes(4))],
    "a correlation id of 1 kB": [("ab.cid", b"1" * 1000), ("ab.reply", bytes(4))],
}


def test_command_that_can_not_be_answered(place: Place, subtests: pytest.Subtests) -> None:
    """The command is carried out all the same: nothing says that a client waits."""
    topic = f"{place.cluster.prefix}.commands"
    tokens = {what: place.begin() for what in WRONG_HEADERS}
    commands = {what: encode(r.Abort(token, "unheard")) for what, token in tokens.items()}
    place.raw.produce([(topic, 0, None, commands[w], WRONG_HEADERS[w]) for w in WRONG_HEADERS])
    for what, token in tokens.items():
        with subtests.test(what):
            until = time.monotonic() + SOON_S
            while place.state(token).state == "OPEN" and time.monotonic() < until:
                time.sleep(0.02)
            assert place.state(token).reason == "unheard"


def test_command_in_a_native_transaction(place: Place) -> None:
    """The command is read before its native transaction ends: it is refused at once, and stalls no other."""
    rude = Producer(
        {
            "bootstrap.servers": place.cluster.bootstrap,
            "transactional.id": f"{place.scope}-commands",
            "log_level": 0,
        }
    )
    rude.init_transactions(20)
    for end in (rude.commit_transaction, rude.abort_transaction):
        token = place.begin()
        rude.begin_transaction()
        cid = place.raw.correlation_id()
        headers = [("ab.cid", cid), ("ab.reply", bytes(4))]
        command = encode(r.Abort(token, "rude"))
        rude.produce(f"{place.cluster.prefix}.commands", command, None, 0, headers=headers)  # type: ignore[arg-type]
        rude.flush(20)
        answer = place.raw.wait(cid, SOON_S)
        assert isinstance(answer, r.Refusal)
        assert answer.code == "InvalidArgument"
        assert "native transaction" in answer.message
        end(20)
        assert place.state(token).state == "OPEN"
        assert place.raw.ask(r.Abort(token, "")).state == "ABORTED"
