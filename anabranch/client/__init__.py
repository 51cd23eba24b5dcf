"""The client: what users import.

`connect` makes a `Client` of a real cluster. `client` has all its calls, with what they do and raise; start there.
The folder `calls` carries out the calls that need more than one command. Its classes and all handles share one
`shared.Shared`.

A commit passes through these files, from the user to the bus:

- `transaction`: the handle of the process that begins a transaction. Its states are a table in
  `core.transaction_states`.
- `commit_parts`: the arguments of a commit or prepare, as one record for all its paths.
- `writer`: the handle of another process in it, and of an open transaction's own events. `receipts`: the place and
  checksum of each event, and the receipt. `reservation`: transactions that begin later.
- `session`: the commands of the protocol, each repeated until it is answered.
- `ports`: all I/O, time and randomness. `librdkafka` implements them, and in memory `anabranch.testing`.

A transaction on tables (docs/inside/tables.md) passes through these first:

- `replica`: a `tables.replica.ReadReplica` with `begin`, `join` and `transact`.
- `table_transaction`: the handle of the process that begins it, and that of a process that joins it.
- `table_access`: their base class: reads of one snapshot, own writes, locks.
- `table_one_shot`: the command by which a short transaction commits: made, sent, sent again, resolved.
- `table_locks`: what was read, and whether it has newer versions. Long transactions register it with the
  controller.
- `own_writes`: the rows that the transaction wrote, from memory or read back from journals.

The client never imports `anabranch.controller`: it knows controllers by the protocol. Only `connect` imports the
libraries of brokers, and only `arrow` and `calls.compact` import pyarrow. A client has one thread for heartbeats
(`shared.Heart`), and one for each replica; the simulator runs both step by step. All waits are those of
`anabranch.waits`, so that `anabranch.aio` runs the same code in greenlets.
"""
