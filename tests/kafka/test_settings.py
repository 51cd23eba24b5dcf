"""Settings: what is honoured, what is let pass, what is refused."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from anabranch.errors import UnsupportedSetting
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.settings import CLIENT_ONLY, parse_settings


def test_defaults() -> None:
    found = parse_settings("localhost:9092", {})
    assert found.bootstrap == (("localhost", 9092),)
    assert found.client_id == "anabranch"
    assert found.request_timeout == 30.0
    assert found.tls is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a:1", (("a", 1),)),
        ("a:1,b:2", (("a", 1), ("b", 2))),
        (" a:1 , b:2,", (("a", 1), ("b", 2))),
        ("PLAINTEXT://a:1", (("a", 1),)),
        ("[::1]:5", (("::1", 5),)),
    ],
)
def test_bootstrap_addresses(text: str, wanted: tuple[tuple[str, int], ...]) -> None:
    assert parse_settings(text, {}).bootstrap == wanted


@pytest.mark.parametrize("text", ["", ",", "a", "a:1,b", "a:b", ":1", "a:"])
def test_wrong_addresses_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedSetting, match=r"bootstrap\.servers"):
        parse_settings(text, {})


def test_options_that_count() -> None:
    found = parse_settings(
        "a:1",
        {
            "client.id": "me",
            "socket.timeout.ms": "1500",
            "socket.connection.setup.timeout.ms": 200,
            "retry.backoff.ms": 7,
            "anabranch.max.request.bytes": 1000,
            "bootstrap.servers": "ignored, given apart",
        },
    )
    assert found.client_id == "me"
    assert found.request_timeout == 1.5
    assert found.connect_timeout == 0.2
    assert found.retry_backoff == 0.007
    assert found.max_request_bytes == 1000
    assert parse_settings("a:1", {"request.timeout.ms": 5}).request_timeout == 0.005


@pytest.mark.parametrize("value", ["soon", "0", -5, None, "1.5"])
def test_wrong_values_are_refused(value: object) -> None:
    with pytest.raises(UnsupportedSetting, match=r"socket\.timeout\.ms"):
        parse_settings("a:1", {"socket.timeout.ms": value})


def test_tuning_of_librdkafka_is_let_pass() -> None:
    given = dict.fromkeys(CLIENT_ONLY, "5")
    assert parse_settings("a:1", given) == parse_settings("a:1", {})


@pytest.mark.parametrize(
    "name",
    [
        "sasl.mechanism",
        "sasl.username",
        "sasl.oauthbearer.token.endpoint.url",
        "ssl.crl.location",
        "enable.ssl.certificate.verification",
        "isolation.level",
        "transactional.id",
        "group.id",
        "broker.address.family",
        "acks ",
        "no.such.option",
    ],
)
def test_everything_else_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedSetting, match=name.replace(".", r"\.")):
        KafkaLog("a:1", {name: "x"})


def test_all_that_is_refused_is_named() -> None:
    with pytest.raises(UnsupportedSetting, match=r"a, z$"):
        parse_settings("h:1", {"z": 1, "a": 2, "client.id": "x"})


def test_protocols() -> None:
    assert parse_settings("a:1", {"security.protocol": "PLAINTEXT"}).tls is None
    for protocol in ("sasl_ssl", "SASL_PLAINTEXT", "other"):
        with pytest.raises(UnsupportedSetting, match=r"security\.protocol"):
            parse_settings("a:1", {"security.protocol": protocol})
    with pytest.raises(UnsupportedSetting, match=r"ssl\.ca\.location without"):
        parse_settings("a:1", {"ssl.ca.location": "/x"})


def test_tls(tmp_path: Path) -> None:
    found = parse_settings("a:1", {"security.protocol": "SSL"}).tls
    assert found is not None
    assert found.check_hostname
    assert found.verify_mode == ssl.CERT_REQUIRED
    lax = {"security.protocol": "ssl", "ssl.endpoint.identification.algorithm": "none"}
    without_names = parse_settings("a:1", lax).tls
    assert without_names is not None
    assert not without_names.check_hostname
    assert without_names.verify_mode == ssl.CERT_REQUIRED
    with pytest.raises(UnsupportedSetting, match="https or none"):
        parse_settings("a:1", {**lax, "ssl.endpoint.identification.algorithm": "maybe"})
    missing = {"security.protocol": "ssl", "ssl.ca.location": str(tmp_path / "no.pem")}
    with pytest.raises(UnsupportedSetting, match="can't be read"):
        parse_settings("a:1", missing)
