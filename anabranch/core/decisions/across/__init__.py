"""Decisions on transactions over several control partitions (`docs/inside/across.md`); `core.across` has the rules.

- ``receiving``: the entrance: messages of other leaders, and what is due in each turn.
- ``coordinating``: what the leader of the control partition in the transaction's id does.
- ``participating``: what the leader of another control partition does, where the transaction has streams.
- ``holding``: which other commits wait for such transactions.
"""
