"""Decisions: what a command, a commit or a due deadline puts on the log.

A decision is a function of a `turn.Turn`, a command and the asker. A decision checks first, and puts rows only
then: a refusal is an error of `anabranch.errors`, raised before anything is put. `decide` is the entrance: a table
from commands to decisions, and the order of what is due in each round. A new command is a line there, a line in
`anabranch.core.authorize` and a function in the file of its subject. A new refusal of a commit or of a begin is one
more entry in the list of checks of `commit` or `transactions`.

Transactions:

- `transactions`: begin, touch, heartbeat, abort, resolve, and the end by time.
- `writers`: writers and their receipts. `claims`: names and series. `positions`: what tasks have consumed.
- `commit`: a commit through journals, from its arrival to its decision, and an end that an operator forces.
- `merge`: decided commits and plain writes go into streams, at once or as a staged merge.
- `one_shot`: a whole transaction in one command. `prepared`: transactions whose coordinator decides.

Streams:

- `scopes`: scopes, descriptions, and what keeps a stream. `streams`: created, altered, lost, recovered, deleted.
- `scale`: scalings, and the policy for them. `bases`: where replicas of a table start.
- `cleanup`: truncation of journals and histories.

Lanes and processors: `lanes` (with grants, the audit and quarantined commands), `quotas`, `ownership`.

`questions` changes nothing. `times` has what clients have seen, and keeps late copies of a command from acting.

Decisions import the rest of the core. `anabranch.core.locks` and this folder import each other, file by file.
"""
