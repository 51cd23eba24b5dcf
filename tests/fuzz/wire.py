"""Fuzzed: brokers' answers, read by hand (produce, fetch, end of a transaction) and by kio (all others).

An input is the number of the call, the version, and the answer's body.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import io
import types
import typing
import uuid
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

from kio.serial import entity_writer

from anabranch.batches.format import read_header
from anabranch.kafka import calls, data
from anabranch.kafka.calls import END_TXN, FETCH, PRODUCE, Api, MalformedAnswer
from anabranch.kafka.data import end_answer
from anabranch.kafka.sasl import OAuthBearer, SaslError, Scram
from anabranch.ports import CorruptBatch, TopicPartition
from tests.fuzz.mutate import mutated
from tests.fuzz.samples import batches
from tests.fuzz.target import Run, Target, always

_TOPIC_ID = uuid.UUID(int=7)
ALL_APIS = tuple(api for api in vars(calls).values() if isinstance(api, Api))
_BY_HAND = (PRODUCE, FETCH, END_TXN)
_NAMES = {_TOPIC_ID.bytes: "a"}


def _seeds() -> list[bytes]:
    found = []
    for number, api in enumerate(ALL_APIS):
        for version in range(api.lowest, api.highest + 1):
            kind = getattr(calls._module(api, version, "response"), f"{api.name}Response")
            for i in range(2):
                out = io.BytesIO()
                message = _sample(Random(f"{api.name}/{version}/{i}"), kind)
                entity_writer(kind)(out, message)
                found.append(bytes((number, version)) + out.getvalue())
    return found


def _sample(random: Random, kind: Any) -> Any:
    """A value of a type of kio's messages."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return _sample(random, random.choice(typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return tuple(
            _sample(random, typing.get_args(kind)[0]) for _ in range(random.choice((1, 1, 3)))
        )
    if kind is type(None):
        return None
    if dataclasses.is_dataclass(kind) and callable(kind):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{name: _field(random, name, hints[name]) for name in names})
    if issubclass(kind, enum.Enum):
        return random.choice(list(kind)[:4])
    simple: tuple[tuple[type, Any], ...] = (
        (bool, random.random() < 0.5),
        (int, random.choice((0, 1, 5, 100))),
        (float, 1.5),
        (str, random.choice(("", "a", "a topic"))),
        (bytes, random.choice(batches())),
        (uuid.UUID, _TOPIC_ID),
        (dt.timedelta, dt.timedelta(milliseconds=5)),
        (dt.datetime, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
    )
    of = getattr(kind, "__bound__", kind)  # a phantom type's
    for base, value in simple:
        if issubclass(of, base):
            return value
    raise TypeError(kind)


def _field(random: Random, name: str, kind: Any) -> Any:
    return _TOPIC_ID if name == "topic_id" else _sample(random, kind)


def _called(given: bytes) -> tuple[Api, int] | None:
    api = ALL_APIS[given[0] % len(ALL_APIS)] if given else PRODUCE
    known = len(given) > 1 and api.lowest <= given[1] <= api.highest
    return (api, given[1]) if known else None


def _answers(given: bytes) -> None:
    called = _called(given)
    if called is not None:
        calls.answer(*called, given[2:])


def _by_hand(given: bytes) -> None:
    called = _called(given)
    if called is None:
        return
    (api, version), body = called, given[2:]
    if api is PRODUCE:
        data.produce_answer(version, body, _NAMES)
    elif api is END_TXN:
        end_answer(version, body)
    elif api is FETCH:
        for answer in data.fetch_answer(version, body, _NAMES).parts.values():
            found = data.fetched(TopicPartition("a", 0), answer, 0, True)
            for batch in found.batches if found is not None else ():
                read_header(batch.data)


def _handmade() -> list[bytes]:
    return [seed for seed in _seeds() if ALL_APIS[seed[0]] in _BY_HAND]


def _generated() -> list[bytes]:
    return [seed for seed in _seeds() if ALL_APIS[seed[0]] not in _BY_HAND]


def _mutated(random: Random, given: bytes, seeds: Sequence[bytes]) -> bytes:
    """The answer's bytes only; call and version stay."""
    same = [seed[2:] for seed in seeds if seed[0] == given[0]]
    return given[:2] + mutated(random, given[2:], same)


_NONCE = "rOprNGfwEbeRWgbNEkqO"  # of the example of RFC 7677
_SCRAM = (
    f"r={_NONCE}%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096\n"
    "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
)
_PROOFS = (_SCRAM, '{"status":"invalid_token","scope":"x"}\n')


def _sasl() -> Run:
    """A broker's side of an exchange, a line each time."""
    mechanisms = (
        Scram("SCRAM-SHA-256", "user", "pencil", lambda: _NONCE),
        OAuthBearer("me", lambda _: "token"),
    )

    def run(given: bytes) -> None:
        for mechanism in mechanisms:
            exchange = mechanism.exchange(0.0)
            next(exchange)
            with suppress(StopIteration, SaslError):
                for answer in given.split(b"\n"):
                    exchange.send(answer)

    return run


TARGETS = (
    Target("sasl", lambda: [text.encode() for text in _PROOFS], _sasl, ()),
    Target("answers", _generated, always(_answers), (MalformedAnswer,), _mutated),
    Target(
        "answers-by-hand",
        _handmade,
        always(_by_hand),
        (MalformedAnswer, CorruptBatch),
        _mutated,
    ),
)
