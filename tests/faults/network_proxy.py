"""A broker behind the faulty network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from anabranch.infra.broker import EmbeddedBroker
from tests.faults.proxy import HOST, Proxy


@dataclass
class Network:
    """``proxied``: where what is under test comes in; ``direct``: past the proxy, for those who check."""

    broker: EmbeddedBroker
    proxy: Proxy

    @property
    def proxied(self) -> str:
        return self.proxy.bootstrap

    @property
    def direct(self) -> str:
        return self.broker.bootstrap


@contextmanager
def start_network(transaction_version: int = 2) -> Iterator[Network]:
    """A broker of its own, which sends every client that comes through the proxy back there."""
    with (
        Proxy() as proxy,
        EmbeddedBroker(
            transaction_version=transaction_version, quick_start=True, proxy=proxy.bootstrap
        ) as broker,
    ):
        proxy.target = (HOST, broker.proxied_port)
        yield Network(broker, proxy)
        proxy.policy = None
        broker.kill()  # its data is not needed: quicker than a shutdown
