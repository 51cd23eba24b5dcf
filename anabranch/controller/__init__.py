"""The controller: the long-lived process that decides transactions and writes their events into the streams.

(Processors in the sense of user programs, with handlers and stores, are in `anabranch.processing`.)

All decisions are made by `anabranch.core`, which is pure. This package reads what clients sent, calls the core,
makes the results durable, and becomes leader or resigns. One process may lead several control partitions, each on a
thread of its own.

The modules, from the outside in:

- `service`: the process of `anabranch controller`: signals, membership in the group, a `Leader` for each control
  partition that the group assigns, the status file. `config` has its options.
- `leader`: the thread of one control partition: become leader, make passes, begin again after a failure.
- `controller`: one pass, in the order below. A `Controller` has no thread and no clock of its own, so the simulator
  runs it, too.
- `leadership`: the steps by which a controller becomes leader, so that no former leader can do harm.
- `intake` fetches commands and journals, and indexes journals. `lanes` takes commands out of their records, queues
  them by lane (a request channel of some clients), measures what each lane may cost, and sends replies.
- `suspects`: which commands go into a round (a native transaction with many decisions), after a round failed.
- `durability`: the order in which a round becomes durable. `history_tail` finds the end of a stream's history, its
  topic with one record for each commit.
- `topic_trouble`: what waits because topics fail: streams, lanes, and work on topics. All else continues.
- `background`: work outside of rounds. `jobs` is the queue of it: how it begins, ends, and is dropped with its
  leadership. Its parts are `stream_topics` (topics are created, altered, grown and deleted), `cleanup` (records are
  deleted), `carrier` (big merges, in chunks), and in `background` itself the sweep for lost markers and the count
  of foreign records. `autoscaling` is no background work: rounds feed it with the loads that they merge.
- `rocksdb_table`: the leader's table, a checkpoint of the status log. `metrics` has the numbers of a leader,
  `monitor` the numbers of any long-lived process and the HTTP server for them.

Start with `controller`, then `durability`. Other packages import `service.run_controller` and
`config.ControllerOptions` (the command line), `monitor` (processing, ledger and Faust have numbers, too) and
`rocksdb_table.open_rows` (stores of workers). Everything else is internal. Nothing here imports `anabranch.client`.

One pass of a leader (`Controller.step`):

1. Native transactions that lack a marker are ended. Streams that are lost are given up, each by a round of its own.
2. The chunks that carriers have merged since the last pass are applied to state and table.
3. Records below the logged low waters are deleted. One chunk of runs that keep a low water down is moved.
4. The first positions of new lanes are logged.
5. Commands and journals are fetched; the wait ends at the next deadline. Journals are indexed.
6. The commands of this round are chosen. A suspect one is logged before it is tried.
7. The core decides these commands, and everything that is due.
8. The round is made durable: data, history records, commit, answers, table. `durability` explains this order.
9. Memory follows: the commands leave their queues, and what the round ended is forgotten.
10. Finished work on topics is logged, and more is begun.

If a round is refused, nothing of it has happened: the rest is decided again without the cause. If its outcome is
unknown, the leader resigns, drops everything that is not logged, and becomes leader again.
"""

from anabranch.extras import need

need("rocksdict", "mode", "prometheus_client", "numpy", "numba", extra="controller")
