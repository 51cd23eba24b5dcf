"""A second listener of the embedded broker, with authentication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_LOGIN = "org.apache.kafka.common.security"
_PREFIX = "listener.name.secure."


@dataclass(frozen=True, slots=True)
class SecureListener:
    """SASL, over TLS if there is a key; loopback clients may still use the plain listener.

    ``users``: name -> password, for PLAIN and SCRAM (which is written when the folder is formatted; no commas).
    OAUTHBEARER takes any token without a signature: for tests only. ``key``: PEM file of the private key (PKCS #8)
    and its certificates. ``client_ca``: PEM file of the authority for clients' certificates, then required.
    """

    users: Mapping[str, str] = field(repr=False)
    key: Path | None = None
    client_ca: Path | None = None

    def properties(self, address: str) -> dict[str, str]:
        """Server properties. The caller appends the first three to the broker's own of those names."""
        plain = "".join(f' user_{user}="{password}"' for user, password in self.users.items())
        scram = f"{_LOGIN}.scram.ScramLoginModule required;"
        found = {
            "listeners": f"SECURE://{address}",
            "advertised.listeners": f"SECURE://{address}",
            "listener.security.protocol.map": (
                f"SECURE:{'SASL_SSL' if self.key else 'SASL_PLAINTEXT'}"
            ),
            f"{_PREFIX}sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            f"{_PREFIX}plain.sasl.jaas.config": (
                f"{_LOGIN}.plain.PlainLoginModule required{plain};"
            ),
            f"{_PREFIX}scram-sha-256.sasl.jaas.config": scram,
            f"{_PREFIX}scram-sha-512.sasl.jaas.config": scram,
            f"{_PREFIX}oauthbearer.sasl.jaas.config": (
                f"{_LOGIN}.oauthbearer.OAuthBearerLoginModule required"
                ' unsecuredLoginStringClaim_sub="broker";'
            ),
        }
        for name, file in (("keystore", self.key), ("truststore", self.client_ca)):
            if file is not None:
                found[f"{_PREFIX}ssl.{name}.type"] = "PEM"
                found[f"{_PREFIX}ssl.{name}.location"] = str(file)
        if self.client_ca is not None:
            found[f"{_PREFIX}ssl.client.auth"] = "required"
        return found

    def format_arguments(self) -> list[str]:
        """Arguments for formatting the broker's folder."""
        return [
            word
            for user, password in self.users.items()
            for kind in ("SCRAM-SHA-256", "SCRAM-SHA-512")
            for word in ("--add-scram", f"{kind}=[name={user},password={password}]")
        ]
