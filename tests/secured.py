"""A broker with an authorizer, and principals with the rights of `anabranch.topics.rights`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka.admin import AclBindingFilter, AdminClient

from anabranch.client.client import Client
from anabranch.errors import InvalidArgument
from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.settings import SecureListener
from anabranch.librdkafka.admin import binding_of
from anabranch.librdkafka.options import Options
from anabranch.protocol.legal_names import split_stream
from anabranch.topics import rights
from anabranch.topics.rights import GROUP, Acl, Right
from anabranch.types import StreamDescription
from tests.waiting import wait_until

AUTHORIZED = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",  # who comes in by the plain listener: the broker itself, and tests' own hands
}
PASSWORD = "wonder land"


def filter_of(acl: Acl) -> AclBindingFilter:
    """A filter that finds exactly this rule."""
    rule = binding_of(acl)
    where = rule.restype, rule.name, rule.resource_pattern_type
    return AclBindingFilter(*where, rule.principal, rule.host, rule.operation, rule.permission_type)


class SecuredBroker(NamedTuple):
    """The broker, and the folder of its certificates."""

    broker: EmbeddedBroker
    folder: Path
    admin: AdminClient

    @property
    def bootstrap(self) -> str:
        """Where principals come in."""
        return self.broker.secure_bootstrap

    def options(self, user: str) -> dict[str, str]:
        """How a principal comes in."""
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.folder / "ca.pem"),
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": user,
            "sasl.password": PASSWORD,
        }

    def grant(self, user: str, rights: Iterable[Right]) -> None:
        self._add([Acl(f"User:{user}", right) for right in dict.fromkeys(rights)])

    def revoke(self, user: str, rights: Iterable[Right]) -> None:
        self._remove([Acl(f"User:{user}", right) for right in dict.fromkeys(rights)])

    @contextmanager
    def denied(self, user: str, right: Right) -> Iterator[None]:
        """Deny a right, whatever is granted."""
        rule = Acl(f"User:{user}", right, allowed=False)
        self._add([rule])
        try:
            yield
        finally:
            self._remove([rule])

    def _add(self, acls: list[Acl]) -> None:
        """Returns when the authorizer has them: brokers answer before."""
        for done in self.admin.create_acls([binding_of(acl) for acl in acls]).values():
            done.result(30)
        last = filter_of(acls[-1])
        wait_until(lambda: self.admin.describe_acls(last).result(30), pause=0.005)

    def _remove(self, acls: list[Acl]) -> None:
        for gone in self.admin.delete_acls([filter_of(acl) for acl in acls]).values():
            assert len(gone.result(30)) == 1


@contextmanager
def secured_broker(
    folder: Path, *users: str, transaction_version: int | None = None
) -> Iterator[SecuredBroker]:
    """A broker that lets in these users, and grants them nothing."""
    for name, signer in (("ca", None), ("broker", "ca")):
        make_certificate(folder, name, signer)
    both = folder / "both.pem"
    both.write_text((folder / "broker.key").read_text() + (folder / "broker.pem").read_text())
    secure = SecureListener(dict.fromkeys(users, PASSWORD), both)
    with EmbeddedBroker(
        properties=AUTHORIZED,
        quick_start=True,
        secure=secure,
        transaction_version=transaction_version,
    ) as broker:
        yield SecuredBroker(
            broker, folder, AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
        )
        broker.kill()


def is_stream(name: str) -> bool:
    """Whether a stream may be called so: tests try others, too."""
    try:
        return bool(split_stream(name))
    except InvalidArgument:
        return False


def make_certificate(folder: Path, name: str, signer: str | None) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
    if signer is not None:
        command += ["-CA", f"{signer}.pem", "-CAkey", f"{signer}.key"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


# -- suites that run so as a whole: --secured -------------------------------------------------------------

CONTROLLER, CLIENT = "controller", "client"
# By the plain address, which tests go on to use with their own hands.
_entered: dict[str, SecuredBroker] = {}


def entrance(bootstrap: str, user: str) -> tuple[str, dict[str, str]]:
    """Where a user comes in, and how: the address itself, but of a broker that is `entered`."""
    secured = _entered.get(bootstrap)
    return (bootstrap, {}) if secured is None else (secured.bootstrap, secured.options(user))


def grant(bootstrap: str, user: str, granted: Iterable[Right]) -> None:
    """Grant a user rights on a broker that is `entered`."""
    if bootstrap in _entered:
        _entered[bootstrap].grant(user, granted)


@contextmanager
def entered(folder: Path, transaction_version: int | None = None) -> Iterator[EmbeddedBroker]:
    """A broker where controllers and this process's clients come in by `entrance`, each with its rights alone.

    Those on control topics come when a controller starts, those on a stream when it is created.
    A client is writer, operator and reader, in any group.
    """
    with (
        secured_broker(
            folder, CONTROLLER, CLIENT, transaction_version=transaction_version
        ) as secured,
        pytest.MonkeyPatch.context() as patch,
    ):
        plain = secured.broker.bootstrap
        _entered[plain] = secured
        make_options, create_stream = Options.__init__, Client.create_stream

        def with_security(self: Options, bootstrap: str, given: Mapping[str, Any]) -> None:
            address, options = entrance(bootstrap, CLIENT)
            make_options(self, address, {**options, **given})

        def with_rights(self: Client, stream: str, *args: Any, **more: Any) -> StreamDescription:
            if is_stream(stream):
                scope = stream.partition("/")[0]
                secured.grant(CONTROLLER, rights.scope_rights(scope))
                secured.grant(
                    CLIENT, [*rights.writer_rights(stream), *rights.reader_rights([], stream)]
                )
            return create_stream(self, stream, *args, **more)

        patch.setattr(Options, "__init__", with_security)
        patch.setattr(Client, "create_stream", with_rights)
        secured.grant(CLIENT, [Right(GROUP, "*", "Read", "any test's group")])
        yield secured.broker
        del _entered[plain]
