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
- `intake` fetches commands and journals; `index_journals` indexes journals. `command` takes a command out of its
  record. `lanes` has the queues of commands, what each lane may cost, and which replies wait.
- `suspects`: which commands go into a round, after a round failed.
- `durability`: the order in which a round becomes durable. `history_tail` finds the end of a stream's history.
- `topic_trouble`: streams whose topics fail: they wait, all others continue.
- `background`: work outside of rounds. Its parts are `carrier` (big merges, in chunks) and `streams` (topics are
  created, grown, truncated and deleted; records that no controller wrote are counted). `streams` also has automatic
  scaling, which rounds feed with the loads that they merge.
- `rocksdb_table`: the leader's table, a checkpoint of the status log. `metrics` has the numbers of a leader,
  `monitor` the numbers of any long-lived process and the HTTP server for them.

Other packages import `service.run_controller` and `config.ControllerOptions` (the command line), `monitor`
(processing, ledger and Faust have numbers, too) and `rocksdb_table.open_rows` (stores of workers). Everything else
is internal. Nothing here imports `anabranch.client`.

One pass of a leader (`Controller.step`):

1. Native transactions that lack a marker are ended. Streams that are lost are given up, each by a round of its own.
2. The chunks that carriers have merged since the last pass are applied to state and table.
3. Records below the logged low waters are deleted. One chunk of runs that keep a journal long is moved.
4. The first positions of new lanes are logged.
5. Commands and journals are fetched; the wait ends at the next deadline. Journals are indexed.
6. The commands of this round are chosen. A suspect one is logged before it is tried.
7. The core decides these commands, and everything that is due.
8. The round is made durable: data, history records, commit, answers, table. `durability` explains this order.
9. Memory follows: the commands leave their queues, and what the round ended is forgotten.
10. Finished work on topics is logged, and more is begun.

If a round is refused, nothing of it has happened: it is decided again without its cause. If its outcome is unknown,
the leader resigns, drops everything that is not logged, and becomes leader again.
"""

from anabranch.extras import need

need("rocksdict", "mode", "prometheus_client", "numpy", "numba", extra="controller")
