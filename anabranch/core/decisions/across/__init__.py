"""Decisions on transactions over several control partitions (`docs/inside/across.md`); `core.across` has the rules.

- ``receiving``: the entrance: messages of other leaders, and what is due in each turn.
- ``coordinating``: what the leader of the control partition in the transaction's id does: messages, votes, the end.
- ``deciding``: its steps in a commit: when it asks for votes, and when it decides.
- ``participating``: what the leader of another control partition does, where the transaction has streams.
- ``joining``: how a transaction gets a part at another control partition.
- ``parts_of_one_shots``: one-shots over several control partitions, at both sides.
- ``holding``: which other commits wait for such transactions.
- ``locking``: what votes and frozen locks do to each other.
- ``forcing``: the ends that an operator forces.
"""
