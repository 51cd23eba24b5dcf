"""The ledger: a database whose commit also commits the events of a transaction (docs/ledger.md).

Start with `ledger.Ledger`, which commits, and recovers what a process left undone. Below it is `book.Book`, the
table through one connection, and below that `dialects`: the SQL, and what differs between databases. ``watch`` has
the metrics of the recovery service; it needs the extra ``controller``, and only the command line imports it.

A ledger uses a client as any program does, so this folder may import the client and what is below it.
"""

from anabranch.ledger.ledger import Ledger, Recovered

__all__ = ["Ledger", "Recovered"]
