"""Clusters that let in only whom they know: TLS with client certificates, SASL, sessions that end."""

from __future__ import annotations

import base64
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

import anabranch
from anabranch import errors
from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.settings import SecureListener
from anabranch.kafka import calls
from anabranch.kafka.calls import METADATA, ConnectionBroken
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.settings import TOKEN_FILE, parse_settings
from anabranch.ports import LogDenied, TopicSpec
from tests.cluster import ControllerProcess, words
from tests.secured import make_certificate

PASSWORD = "wonder land"
WRONG = "planted-secret"
SESSION_S = 3.0
RIGHTS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS;User:alice",  # the plain listener is for the broker itself
    "connections.max.reauth.ms": f"{SESSION_S * 1000:.0f}",
}
SCRAM = {"sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "alice", "sasl.password": PASSWORD}


class Place(NamedTuple):
    """A broker, and the files of who comes to it."""

    broker: EmbeddedBroker
    folder: Path

    def options(self, given: dict[str, str], certificate: str = "alice") -> dict[str, str]:
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.folder / "ca.pem"),
            "ssl.certificate.location": str(self.folder / f"{certificate}.pem"),
            "ssl.key.location": str(self.folder / f"{certificate}.key"),
        } | given

    def log(self, given: dict[str, str], certificate: str = "alice") -> KafkaLog:
        return KafkaLog(
            self.broker.secure_bootstrap,
            self.options({"request.timeout.ms": "5000"} | given, certificate),
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("sasl")
    for name, signer in (("ca", None), ("broker", "ca"), ("alice", "ca"), ("stranger", None)):
        make_certificate(folder, name, signer)
    both = folder / "both.pem"
    both.write_text((folder / "broker.key").read_text() + (folder / "broker.pem").read_text())
    now = int(time.time())
    parts = ({"alg": "none"}, {"sub": "alice", "iat": now - 60, "exp": now + 3600})
    token = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts]
    (folder / "token").write_bytes(b".".join(token) + b".\n")
    secure = SecureListener({"alice": PASSWORD}, both, folder / "ca.pem")
    with EmbeddedBroker(properties=RIGHTS, quick_start=True, secure=secure) as broker:
        yield Place(broker, folder)


MECHANISMS = ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN", "OAUTHBEARER")


def known(place: Place, mechanism: str) -> dict[str, str]:
    """How alice proves who she is."""
    if mechanism == "OAUTHBEARER":
        return {"sasl.mechanism": mechanism, TOKEN_FILE: str(place.folder / "token")}
    return SCRAM | {"sasl.mechanism": mechanism}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_each_mechanism_lets_in(place: Place, mechanism: str, unique: str) -> None:
    log = place.log(known(place, mechanism))
    log.create_topics([TopicSpec(unique, 1, {})])
    assert log.describe_topics([unique])[unique].partitions == 1
    log.close()


@pytest.mark.parametrize(
    "mechanism",
    [
        pytest.param(MECHANISMS[0], marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.soak) for name in MECHANISMS[1:]),
    ],
)
def test_a_cluster_that_knows_its_users(
    place: Place, mechanism: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Controller, writers and readers; sessions end several times, unnoticed."""
    caplog.set_level(logging.INFO)
    options = place.options(known(place, mechanism))
    prefix = f"p-{mechanism.lower()}"
    scope = mechanism.lower()
    stream = f"{scope}/a"
    controller = ControllerProcess(
        place.broker.secure_bootstrap,
        tmp_path / "one",
        prefix=prefix,
        arguments=words(options),
    )
    with (
        controller,
        anabranch.connect(place.broker.secure_bootstrap, config=options, prefix=prefix) as client,
    ):
        controller.wait_leading()
        client.create_stream(stream)
        until = time.monotonic() + 3 * SESSION_S
        with client.read(stream, group=f"{prefix}-readers", timeout=30) as reader:
            number = 0
            while time.monotonic() < until:
                number += 1
                with client.begin(scope) as txn:
                    txn.write(stream, b"%d" % number)
                    if number % 2:
                        txn.flush()  # into the journal, instead of along with the commit
                    txn.commit()
                assert next(reader).value == b"%d" % number
                time.sleep(SESSION_S / 20)  # the sessions' ends count, not the transactions
            values = [b"column %d" % n for n in range(5_000)]
            with client.begin(scope) as txn:
                txn.write_batch(stream, pa.table({"value": values}))
                txn.commit()
            assert {next(reader).value for _ in values} == set(values)
        assert number > 10
        said = controller.log_file.read_text()
        assert json.loads(controller.status_file.read_text())["terms"] == {"0": 1}
    for text in (said, caplog.text):
        assert not re.search("(through|by way of) librdkafka", text)
        assert "WARNING" not in text
        assert PASSWORD not in text


def test_a_session_is_renewed_with_answers_under_way(place: Place) -> None:
    """They come in their order, and none is lost; a session may end while it is unused, too."""
    settings = parse_settings(place.broker.secure_bootstrap, place.options(SCRAM))
    soon = time.monotonic() + 30
    connection = Cluster(settings).pool.open(settings.bootstrap[0], soon)
    for pause in (0.75 * SESSION_S, 1.5 * SESSION_S):
        body = calls.request(METADATA, 5, topics=(), allow_auto_topic_creation=False)
        before = [
            connection.send(METADATA.key, 5, (body,), flexible=False, deadline=soon) for _ in "12"
        ]
        time.sleep(pause)
        after = connection.send(METADATA.key, 5, (body,), flexible=False, deadline=soon)
        assert after > before[-1] + 1  # the exchange came in between
        assert connection.buffered()
        for one in (after, *before):
            assert calls.answer(METADATA, 5, connection.receive(one, soon)).cluster_id
    connection.close()


@pytest.mark.parametrize(
    "mechanism",
    [
        "SCRAM-SHA-512",
        pytest.param("PLAIN", marks=pytest.mark.soak),
        pytest.param("OAUTHBEARER", marks=pytest.mark.soak),
    ],
)
def test_an_unknown_user_is_refused_at_once(
    place: Place, mechanism: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    given = SCRAM | {"sasl.mechanism": mechanism, "sasl.password": WRONG}
    if mechanism == "OAUTHBEARER":
        (tmp_path / "token").write_text(f"{WRONG}.{WRONG}.{WRONG}")
        given = {"sasl.mechanism": mechanism, TOKEN_FILE: str(tmp_path / "token")}
    started = time.monotonic()
    log = place.log(given)
    with pytest.raises(LogDenied, match=f"not let in by {mechanism} as") as denied:
        log.describe_topics(["x"])
    options = place.options(given)
    with (
        anabranch.connect(place.broker.secure_bootstrap, config=options, timeout=30) as client,
        pytest.raises(errors.NotAuthorized) as refused,
    ):
        client.create_stream("nyc/a")
    assert time.monotonic() - started < 25
    controller = ControllerProcess(
        place.broker.secure_bootstrap, tmp_path / "one", arguments=words(options)
    )
    with controller:
        assert controller.ended() == 2
        said = controller.log_file.read_text()
    assert "NotAuthorized" in said
    assert f"not let in by {mechanism}" in said
    for text in (str(denied.value), str(refused.value), said, caplog.text):
        assert WRONG not in text


@pytest.mark.soak
def test_a_mechanism_or_listener_that_is_not_there(place: Place) -> None:
    log = KafkaLog(place.broker.bootstrap, {"security.protocol": "SASL_PLAINTEXT"} | SCRAM)
    with pytest.raises(LogDenied, match=r"refuses the mechanism \(34\)"):
        log.describe_topics(["x"])


@pytest.mark.parametrize(
    "address", [pytest.param("secure_bootstrap", marks=pytest.mark.long), "another host"]
)
def test_a_certificate_that_is_not_trusted_is_named(place: Place, address: str) -> None:
    options, bootstrap = place.options(SCRAM), place.broker.secure_bootstrap
    if address == "another host":
        # The certificate is of the address alone.
        bootstrap = bootstrap.replace("127.0.0.1", "localhost")
    else:
        options["ssl.ca.location"] = str(place.folder / "stranger.pem")
    with (
        anabranch.connect(bootstrap, config=options, timeout=6) as client,
        pytest.raises(
            errors.NotReady, match=f"certificate of what listens at {bootstrap} is not trusted"
        ),
    ):
        client.streams()


@pytest.mark.soak
def test_certificates_are_read_again(place: Place, tmp_path: Path) -> None:
    """For new connections: a stranger does not let the broker in, nor is let in."""
    for name in ("ca", "alice"):
        copy(place.folder / "stranger", tmp_path / name)
    options = Place(place.broker, tmp_path).options(SCRAM)
    cluster = Cluster(parse_settings(place.broker.secure_bootstrap, options))
    address = cluster.settings.bootstrap[0]

    def is_let_in() -> bool:
        cluster.pool.open(address, time.monotonic() + 30).close()
        return True

    with pytest.raises(ConnectionBroken, match="certificate verify failed"):
        is_let_in()
    copy(place.folder / "ca", tmp_path / "ca")
    with pytest.raises(ConnectionBroken, match=r"(?i)alert|reset|closed|pipe"):
        is_let_in()
    # A certificate that is replaced before its key is no pair: the former pair is used meanwhile.
    (tmp_path / "alice.pem").write_text((place.folder / "alice.pem").read_text())
    with pytest.raises(ConnectionBroken, match=r"(?i)alert|reset|closed|pipe"):
        is_let_in()
    copy(place.folder / "alice", tmp_path / "alice")
    assert is_let_in()


def copy(source: Path, target: Path) -> None:
    for kind in (".pem", ".key"):
        target.with_suffix(kind).write_text(source.with_suffix(kind).read_text())
