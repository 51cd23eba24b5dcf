"""Replicas of tables: versions of rows in RocksDB, followed from histories (docs/inside/tables.md).

Transactions on tables are commands of a client, so they are in `anabranch.client`: `client.replica.Replica` is
this folder's `ReadReplica` with transactions. Code here knows controllers by one port, `follow.SafeTimes`, and
brokers by the ports of `anabranch.reading`.

Start with `replica`, whose `step` is all the work that a replica does:

- `replica`: tables in a folder, followed by a thread or step by step; waiting for times, snapshots, sweeps.
- `follow`: reads the tables' histories, and stores the rows that COMMIT records name, or those of a base
  (a table's rows at one moment, in a stream of their own).
- `snapshot`: reads of tables as of one time.
- `store`: rows and their versions in RocksDB, as bytes, written in batches with the mark of their table; safe
  under fork.
- `indexes`: the user's functions that return the values by which a row can be looked up.
- `rocks`: complete reads of RocksDB, and its errors, also for the tables of controllers and processors.
- `changes`: the changes of a table's rows in commit order, for `Client.changes`.
"""

from anabranch.extras import need

need("rocksdict", extra="tables")
