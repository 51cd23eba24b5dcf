"""Transactions across control partitions, the pure part (`docs/inside/across.md`).

A transaction has one *coordinator*, the control partition in its id. Another control partition where it has streams
or locks is a *participant*: its part there is a prepared transaction, whose coordinator is elsewhere. Leaders send
each other *messages*. Rules in this folder's comments have the names that the page gives them.

- ``holds``: timestamps that are given and not merged yet, per stream: who waits for whom, and which times are safe.
- ``participant``: what a participant does with each message, as one table, and what it promises.
- ``coordinator``: which votes count, what follows from them, and what is still to be sent.
- ``messages``: who may have sent a message, which time it may bring, and who gives way to whom.

The functions take rows and records, and return rows and actions. They change nothing but a `Holds`.
"""
