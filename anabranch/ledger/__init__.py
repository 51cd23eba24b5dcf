"""A row and its events, or neither: the commit of a database decides for a transaction (docs/ledger.md)."""

from anabranch.ledger.ledger import Ledger, Recovered

__all__ = ["Ledger", "Recovered"]
