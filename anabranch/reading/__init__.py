"""Readers of streams: events in order, whole transactions, snapshots, offset ranges, and tasks of processors.

Start with `history`: a stream's history has one record for each commit and each stream epoch, and says which
offsets of the stream's partitions belong to which commit. Every reader follows it.

From fetches to events:

- `committed_log`: one reader's log: committed batches, and questions that are repeated until a deadline.
- `decoded`: fetched batches as blocks of records, and blocks as events.
- `feed`: records of several partitions at once. `history`: records of the history, in order or searched.
- `commit_index`: the commit of an offset, and when a segment may be read, for readers that return one event after
  the other. `commit_columns`: the commits in arrays, for ranges (needs numpy and numba).
- `commit_feed`: commits in order, each with its events, for readers of whole commits.

Readers, each with the client's call that makes it:

- `ordered_reader` (`Client.read`).
- `snapshot` (`Client.snapshot`): plans of snapshots, and their readers.
- `transaction_reader` (`Client.read_transactions`).
- `task_reader`: a processor's tasks (`Client.read` with a task ownership). `slices`: the events that it returns.
- `ranges`: offset ranges as Arrow batches, for Spark. `event_columns`: the schema of these batches.
- `iteration`: the base of all readers: iterating, closing, forking; and the open readers of a client.

Without a reader:

- `positions`: where a processor starts, and the mirror of its positions in a consumer group.
- `group_lag`: positions and lag of groups and processors. `store_lookup`: one row of a processor's store.

This package knows brokers, groups and clocks by `anabranch.ports` alone. Modules that need numpy are imported only
where they are used, because a small installation has none: `commit_columns`, `event_columns`, `ranges`, `slices`,
`task_reader`.
"""
