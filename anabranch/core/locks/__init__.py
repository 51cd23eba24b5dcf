"""Locks on what transactions read of tables, and their conflicts with the writes of others.

A transaction over tables reads at a snapshot and locks what it reads: keys by their fingerprints, and ranges. Then
it may commit only if no other commit before its commit timestamp changed what it locked. `docs/inside/tables.md`
has the rules for all files of this folder, and why they hold. Start with `conflicts`: all checks of a commit
against locks are there.

- `table_writes`: what a commit wrote to a table: fingerprints, and keys or their bounds.
- `recent_writes`: the latest writes to each table, by which the leader decides whether locks hold. If they do not
  reach far enough, the client is asked to revalidate.
- `lock_table`: registered locks, which are rows of open transactions. A write breaks some of them for certain
  (`LockTable.conflicts`), and may break others (`LockTable.possible_conflicts`).
- `registering`: the decisions that register locks, and list them.
- `conflicts`: `check_conflicts` refuses a commit because of what its transaction read; `merge` notes what a commit
  writes, and breaks the locks of others.
- `frozen`: locks of transactions that can't be aborted, which are staged or prepared: commits that would break them
  wait.

`table_writes`, `recent_writes` and `lock_table` are data, which `anabranch.core.state` and `memory` keep. The other
three are decisions, over a `Turn`.
"""
