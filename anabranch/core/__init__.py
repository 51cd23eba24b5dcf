"""The pure core: all rules of transactions, streams and tables, as functions over data.

The core does no I/O, and has no clock, no randomness and no threads: its callers pass times, ids and the data that
they read. So the same commands on the same rows give the same result, in production, on replay and in the
simulator. The *shell* is the code of the controller around the core (`anabranch.controller`): it reads commands and
journals, calls the core, and appends what the core decided.

Start with `transaction_states`, one page that says what a transaction can do. Then read `decisions.turn` (what a
decision sees and changes) and `decisions.transactions` (begin, touch, which adds a stream, and abort). For a
commit, read `parts` (what it may consist of), `decisions.commit`, then `decisions.merge`.

The state of a control partition:

- `state`: the fold of the status log; `rows`: the keys of its rows. `transaction_states`, `stream_states`: the
  legal transitions, as tables.
- `memory`: what a leader keeps in memory only.
- `journal_index`: what writers wrote to the journals, and what open transactions keep there; `journal_runs`: its
  rows, and how receipts are compared.
- `segments`, `stream_settings`: layouts of streams, and what a user may set.
- `derivations`: who may write to tables that others derive from; `derived_rows`: the rows that clients derive.
- `authorize`: which lane (a request channel of some clients) may do what. `work`: what commands cost.

A *turn* decides the commands and deadlines that are due. Its result is a `round`, which the shell writes in one
native transaction; `history_records` makes the records of histories from it.

Two folders decide: `decisions` has a file for each subject, `locks` is about reads of tables.

The core imports `anabranch.protocol` and `anabranch.errors`, and nothing else of anabranch. `ruff.toml` here bans
clocks, randomness, threads and I/O.
"""
