"""Secrets stand in no repr, log line or error text."""

from __future__ import annotations

import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from anabranch import errors
from anabranch.cli.options import Target
from anabranch.client.reservation import Reservation
from anabranch.clock import SystemEntropy
from anabranch.controller.config import ControllerOptions
from anabranch.controller.lanes import Command
from anabranch.core.state import OpenTxn
from anabranch.protocol.ids import SECRET_SIZE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.tokens import Token, TokenBytes, make, narrow, peek
from examples.flights.run import Settings as Flights
from tests.client.answers import STREAM
from tests.client.bench import Bench
from tests.client.world import World

SECRET = b"planted: thirty-two secret bytes"
TXN = bytes(16)
PASSWORD = {"sasl.password": SECRET.decode()}


def shows(text: str, secret: bytes = SECRET) -> bool:
    return any(
        form in text for form in (secret.hex(), repr(secret)[2:-1], repr(secret[-20:])[2:-1])
    )


def row() -> r.TxnRow:
    return r.TxnRow(TXN, "nyc", None, "OPEN", 1, 1, 0, 0, 0, 0, 0, "", SECRET, "open")


def planted_token() -> TokenBytes:
    """A token that ends with what is planted, as if that were its MAC."""
    made = make(SECRET, Token(TXN, 1, 1, "nyc", "open"))
    return TokenBytes(made[:-32] + SECRET)


def values() -> list[Any]:
    target = Target("b:9092", "p", 1.0, PASSWORD)
    begin = r.Begin(TXN, "nyc", None, 1, SECRET)
    return [
        begin,
        r.Touch(SECRET, STREAM),
        r.Register(SECRET, r.Receipt(TXN, 1, 1, True, ())),
        r.Commit(SECRET, (), None, None, 1),
        r.Abort(SECRET, ""),
        r.Force(SECRET, ""),
        r.Heartbeat((SECRET,)),
        r.GetState(TXN, SECRET),
        r.Resolve(TXN, "nyc", SECRET),
        planted_token(),
        peek(planted_token()),
        row(),
        OpenTxn(row()),
        Command(0, None, encode(begin), native=False),
        Reservation("nyc", TXN, 1, SECRET),
        target,
        Flights(kafka=PASSWORD),
        ControllerOptions(bootstrap="b:9092", data_dir=Path("d"), kafka=PASSWORD),
    ]


@pytest.mark.parametrize("value", values(), ids=lambda value: type(value).__name__)
def test_a_repr_shows_no_secret(value: Any) -> None:
    assert shows(SECRET.hex())
    assert shows(f"x{SECRET!r}")
    for text in (repr(value), str(value), f"{[value]}"):
        assert not shows(text)


def test_errors_and_logs_show_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """A transaction's life with everything that refuses, at the most talkative level."""
    caplog.set_level(logging.DEBUG)
    world = World()
    client = world.client
    client.create_stream(STREAM, segments=1)
    reservation = client.reserve("nyc", name="daily")
    with client.join(reservation) as writer:
        writer.write(STREAM, b"v", key=b"k")
    token = writer._token
    assert token is not None
    other = make(SECRET, peek(token))
    narrowed = narrow(token, rights=4)
    said: list[str] = [
        repr(client),
        repr(writer),
        repr(reservation),
        f"{token!r} {narrowed!r}",
        str(narrowed),
    ]
    for call in (
        lambda: client.join(other).write(STREAM, b"v"),
        lambda: client.join(token).write("sfo/x", b"v"),
        lambda: client.abort(other),
        lambda: client.commit(other),
        lambda: client.force(token),
        lambda: client.join(narrowed),
        lambda: client.abort(narrowed),
        lambda: narrow(narrowed, rights=31),
        lambda: client.state(token[:40]),
        lambda: client.commit(token, name="another"),
        lambda: client.resolve(other),
        lambda: client.commit(token, receipts=[b"no receipt"]),
    ):
        with pytest.raises(errors.AnabranchError) as caught:
            call()
        said += [str(caught.value), repr(caught.value), repr(caught.value.args)]
    text = "\n".join((*said, caplog.text))
    for secret in (SECRET, reservation.secret[-8:], token[-32:], narrowed[-32:], other[-32:]):
        assert not shows(text, secret)


def test_the_file_that_hands_a_reservation_over_is_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handover = pytest.importorskip("anabranch.spark.sink.writer")
    options = pytest.importorskip("anabranch.spark.options")
    monkeypatch.setenv(handover.LOCAL_DIRS, str(tmp_path))
    made = handover.Handover(options.Options({"queryname": "q"}))
    reservation = Reservation("nyc", TXN, 1, SECRET)
    before = os.umask(0)
    try:
        for _ in range(2):
            made.leave(reservation)
    finally:
        os.umask(before)
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert made.find() == reservation
    writer = pytest.importorskip("anabranch.spark.sink.writer")
    assert not shows(repr(writer.Written(reservation, b"", 1, "q", "0")))
    connection = options.Connection("b:9092", "p", 1.0, tuple(PASSWORD.items()))
    assert not shows(repr(connection))


def test_an_id_is_drawn_once_and_a_forked_child_draws_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = SystemEntropy()
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda n: draw(16 if n % 3 else 9), range(2000)))
    assert [len(each) for each in found] == [16 if n % 3 else 9 for n in range(2000)]
    assert len({each[:9] for each in found}) == len(found)
    assert len(draw(5000)) == 5000
    draw._drawn = BytesIO(bytes(600))  # what a parent has drawn
    assert draw(8) == bytes(8)
    assert draw(32) != bytes(32), "a secret is none of it"
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert draw(8) != bytes(8)


def test_every_transaction_has_a_secret_of_its_own() -> None:
    """Its id, scope, keepalive and name are public: the secret alone makes its token."""
    bench = Bench()
    for name in (None, "daily"):
        bench.client.begin("nyc", name=name).token()
    secrets = [begin.secret for begin in bench.bus.of(r.Begin)]
    secrets += [bench.client.reserve("nyc").secret for _ in range(2)]
    assert len({*secrets}) == 4
    assert {len(secret) for secret in secrets} == {SECRET_SIZE}
