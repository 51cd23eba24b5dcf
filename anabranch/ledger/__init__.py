"""The ledger: a database whose commit also commits the events of a transaction (docs/ledger.md)."""

from anabranch.ledger.ledger import Ledger, Recovered

__all__ = ["Ledger", "Recovered"]
