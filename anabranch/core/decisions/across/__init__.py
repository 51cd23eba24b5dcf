"""Decisions on transactions over several control partitions. `docs/inside/across.md` begins with an example.

A transaction has one *coordinator*, the leader of the control partition in its id. The leader of another control
partition where it has streams or locks is a *participant*. One leader is both, for different transactions.
`core.across` has the rules as pure functions of rows and messages; a file here reads rows, calls these functions,
and puts rows and messages into the turn's round. The files in the order in which a commit meets them:

- ``joining``: at a participant, a client's first touch or lock opens a part, if the coordinator allows it.
- ``deciding``: at the coordinator, the steps of a commit: when votes are asked for, and when it is decided.
- ``coordinating``: at the coordinator, what these steps do: votes, repeated messages, `Done`, the end.
- ``participating``: at a participant, what a question for a vote and a decision do.
- ``coordinating_one_shots``, ``parts_of_one_shots``: one-shots, at the coordinator and at a participant.
- ``receiving``: the entrance for the messages of other leaders, and what is due in each turn.
- ``holding``: which other commits wait for such transactions.
- ``locking``: what votes and frozen locks do to each other.
- ``forcing``: the ends that an operator forces.

Rows of their own: a `CoordinatorRow` is a participant's *promise*. At the coordinator, a `VotesRow` has the present
round of votes, and a `PartitionRow` is one participant.
"""
