"""Settings: the honoured, the ignored and the refused ones."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import pytest

from anabranch.errors import UnsupportedSetting
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.settings import CLIENT_ONLY, TOKEN_FILE, parse_settings


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


@pytest.mark.parametrize(
    "text", ["", ",", "a", "a:1,b", "a:b", ":1", "a:", "a..b:1", f"{'a' * 64}.b:1"]
)
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
        "sasl.kerberos.principal",
        "sasl.oauthbearer.config",
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
    with pytest.raises(UnsupportedSetting, match=r"^a, z: "):
        parse_settings("h:1", {"z": 1, "a": 2, "client.id": "x"})


def test_protocols() -> None:
    assert parse_settings("a:1", {"security.protocol": "PLAINTEXT"}).tls is None
    with pytest.raises(UnsupportedSetting, match=r"security\.protocol=other"):
        parse_settings("a:1", {"security.protocol": "other"})
    for protocol, name in (("ssl", TOKEN_FILE), ("sasl_plaintext", "ssl.ca.location")):
        with pytest.raises(UnsupportedSetting, match=rf"{re.escape(name)} without"):
            parse_settings("a:1", {"security.protocol": protocol, name: "/x"})


USER_NAME = {"sasl.username": "me"}
USER = USER_NAME | {"sasl.password": "hush"}
OIDC = {
    "sasl.oauthbearer.method": "OIDC",
    "sasl.oauthbearer.token.endpoint.url": "https://idp/token",
    "sasl.oauthbearer.client.id": "me",
    "sasl.oauthbearer.client.secret": "hush",
    "sasl.oauthbearer.scope": "logs",
    "sasl.oauthbearer.extensions": "logicalCluster=lkc-1, poolId=p",
}


@pytest.mark.parametrize(
    ("mechanism", "given", "principal"),
    [
        ("plain", USER, "me"),
        ("SCRAM-SHA-256", USER, "me"),
        ("SCRAM-SHA-512", USER, "me"),
        ("OAUTHBEARER", {TOKEN_FILE: "/run/token"}, "the bearer of /run/token"),
        ("OAUTHBEARER", OIDC, "me"),
    ],
)
@pytest.mark.parametrize("option", ["sasl.mechanism", "sasl.mechanisms"])
def test_mechanisms(option: str, mechanism: str, given: dict[str, str], principal: str) -> None:
    made = parse_settings("a:1", {"security.protocol": "SASL_SSL", option: mechanism} | given)
    assert made.tls is not None
    assert made.sasl is not None
    assert (made.sasl.name, made.sasl.principal) == (mechanism.upper(), principal)
    assert "hush" not in f"{made!r} {made}"
    plaintext = {"security.protocol": "sasl_plaintext", option: mechanism}
    assert parse_settings("a:1", plaintext | given).tls is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "GSSAPI: give one of PLAIN, SCRAM-SHA-256"),
        ({"sasl.mechanism": "AWS_MSK_IAM"}, "AWS_MSK_IAM: give one of"),
        ({"sasl.mechanism": "PLAIN", "sasl.username": "me"}, r"needs sasl\.password"),
        (
            {"sasl.mechanism": "PLAIN", "sasl.password": "hush", TOKEN_FILE: "/x"} | USER_NAME,
            "leave them out",
        ),
        ({"sasl.mechanism": "SCRAM-SHA-256", "sasl.password": "hush"}, r"needs sasl\.username"),
        ({"sasl.mechanism": "PLAIN", "sasl.password": "a\udcffhush"} | USER_NAME, "not plain text"),
        ({"sasl.mechanism": "OAUTHBEARER"}, r"anabranch\.oauthbearer\.token\.file, oauth_cb"),
        ({"sasl.mechanism": "OAUTHBEARER", TOKEN_FILE: "/x"} | OIDC, "token.file, oauth_cb"),
        (
            {"sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.method": "oidc"},
            r"token\.endpoint\.url and sasl\.oauthbearer\.client\.id and",
        ),
        (
            {"sasl.mechanism": "OAUTHBEARER"}
            | OIDC
            | {"sasl.oauthbearer.token.endpoint.url": "file:///etc/passwd"},
            r"no http\(s\) address",
        ),
    ],
)
def test_what_a_mechanism_lacks_is_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(UnsupportedSetting, match=said) as caught:
        parse_settings("a:1", {"security.protocol": "sasl_ssl"} | given)
    assert "hush" not in str(caught.value)


def test_tls_checks_the_host_name_unless_it_is_switched_off(tmp_path: Path) -> None:
    found = parse_settings("a:1", {"security.protocol": "SSL"}).tls
    assert found is not None
    context = found.context()
    assert context.check_hostname
    assert context.verify_mode == ssl.CERT_REQUIRED
    lax = {"security.protocol": "ssl", "ssl.endpoint.identification.algorithm": "none"}
    without_names = parse_settings("a:1", lax).tls
    assert without_names is not None
    assert not without_names.context().check_hostname
    assert without_names.context().verify_mode == ssl.CERT_REQUIRED
    with pytest.raises(UnsupportedSetting, match="https or none"):
        parse_settings("a:1", {**lax, "ssl.endpoint.identification.algorithm": "maybe"})
    missing = {"security.protocol": "ssl", "ssl.ca.location": str(tmp_path / "no.pem")}
    with pytest.raises(UnsupportedSetting, match="can't be read"):
        parse_settings("a:1", missing)
