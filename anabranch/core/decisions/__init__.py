"""Decisions: what a command, a commit or a due deadline puts on the log.

A decision is a function of a `turn.Turn`, a command and the asker (`core.round.ReplyTo`). Each decision checks
first, and puts rows only then: a refusal is an error of `anabranch.errors`, raised before anything is put. `decide`
is the entrance: a table from commands to decisions, and the order of what is due in each turn. A new command is a
line there, a line in `anabranch.core.authorize` and a function in the file of its subject. A new refusal of a
commit or of a begin is one more entry in the list of checks of `commit` or `transactions`; a new part of a commit
is one more entry in the list of `core.parts`.

Transactions:

- `transactions`: begin, touch (add a stream), heartbeat, abort, resolve (ask for the outcome); transactions without
  heartbeats are aborted, and old outcomes deleted.
- `writers`: writers and their receipts. `claims`: who may use a name of a transaction, or a series of numbered
  commits. `positions`: what tasks have consumed.
- `commit`: a commit through journals, from its arrival to its decision, and an end that an operator forces.
- `merge`: the merge of decided commits and plain writes into streams, in one round or, if they are big, staged in
  several.
- `one_shot`: a whole transaction in one command. `prepared`: transactions whose coordinator decides.

Streams:

- `scopes`: scopes, descriptions of streams, and what prevents a stream's deletion.
- `streams`: streams are created, altered, truncated, lost, recovered, deleted.
- `scale`: scalings, and the policy for them. `bases`: a table's rows at one moment, where new replicas start.
- `cleanup`: truncation of journals and histories.

Lanes and processors: `lanes` (request channels of clients; with grants, which are their rights, the audit and
quarantined commands), `quotas`, `ownership` (of tasks).

`questions` changes nothing. `times`: each command has the newest hybrid time that its sender had seen. So a late
copy, whose sender did not know of a newer change, is refused.

Decisions import the rest of the core. Some files of `anabranch.core.locks` import files of this folder, and the
reverse.
"""
