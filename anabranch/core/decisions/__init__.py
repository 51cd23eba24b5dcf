"""Decisions: what a command, a commit or a due deadline puts on the log.

A decision is a function of a `turn.Turn`, a command and the asker (`core.round.ReplyTo`). Each decision checks
first, and puts rows only then: a refusal is an error of `anabranch.errors`, raised before anything is put. `decide`
is the entrance: a table from commands to decisions, and the order of what is due in each turn. A new command is a
line there, a line in `anabranch.core.authorize` and a function in the file of its subject. A new refusal of a
commit or of a begin is one more entry in the list of checks of `commit` or `transactions`.

Transactions:

- `transactions`: begin, touch, heartbeat, abort, resolve; silent transactions and old outcomes.
- `writers`: writers and their receipts. `claims`: names and series. `positions`: what tasks have consumed.
- `commit`: a commit through journals, from its arrival to its decision, and an end that an operator forces.
- `merge`: the merge of decided commits and plain writes into streams, at once or staged.
- `one_shot`: a whole transaction in one command. `prepared`: transactions whose coordinator decides.

Streams:

- `scopes`: scopes, descriptions of streams, and what prevents a stream's deletion.
- `streams`: streams are created, altered, truncated, lost, recovered, deleted.
- `scale`: scalings, and the policy for them. `bases`: where replicas of a table start.
- `cleanup`: truncation of journals and histories.

Lanes and processors: `lanes` (with grants, the audit and quarantined commands), `quotas`, `ownership`.

`questions` changes nothing. `times`: hybrid times that clients have seen; they also prevent late copies of a
command from changing anything.

Decisions import the rest of the core. `anabranch.core.locks` and this folder import each other, file by file.
"""
