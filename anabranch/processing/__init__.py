"""Processors as programs: handlers, stores and timers, whose effects are in one commit (`docs/processing.md`).

(The controller, whose folder is `anabranch.controller`, decides the transactions of these programs.)

Start with `worker.Worker`: it takes tasks, reads their state, and handles one batch of events after another,
each in one commit. The life of a batch:

1. `batch.WorkBatch` is made, on top of the stored rows or of the batch that is being committed.
2. ``handlers`` calls the program's functions. ``stores`` and ``timers`` change the batch by the
   `HandlerContext` of the call; ``failures`` undoes a call that failed, repeats it, and writes a dead letter in
   the end.
3. ``commits`` sends the batch in one transaction, and then writes its rows to the table. The docstring there
   says why the steps have this order.

``spans`` (sessions, sliding windows, versions, rows that expire) and ``joins`` are ordinary uses of stores and
timers. ``aggregates`` has what they compute by name.

A user declares a program by ``app`` (`anabranch.Processor`); ``program`` has what workers see of it.
A worker's copy of its state is in ``table`` (RocksDB), read from the log by ``state``.
``plain`` reads plain Kafka topics in place of streams. `threads.ThreadedWorker` moves tasks between threads, each
of which is a `Worker`. `run.run_worker` is a whole process with signals, HTTP and the mirror of positions, whose
numbers are in ``metrics``.

This folder may import the client, `anabranch.controller.monitor`, reading, tables and what is below them. Only
Faust's adapter, the command line and `anabranch.testing` import it; the latter's driver runs `handlers` without the
rest.
"""

from anabranch.extras import need

need("rocksdict", "mode", "prometheus_client", "numpy", "numba", extra="controller")
