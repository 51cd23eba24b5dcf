"""One workload for the tests that kill, freeze and corrupt: actors, a plan, and the record of what they did.

Every process of a run is forked by `zygote.Zygote`, so that it starts at once and can be killed by SIGKILL. A
`zygote.Spec` describes it, and names the function that it runs. ``Spec.mutant`` plants a bug of `tests.mutants`
in that process alone.

**Actors**

- `writers.Write`: threads that commit, abort or forget transactions of the kinds that a `writers.Plan` weighs,
  and one thread that writes plain events. `writers.Help`: a process that joins their transactions by token.
- `readers.Read`: readers in stream order, of whole transactions, or raw, each alone or in a group; and snapshots.
  `groups.Watcher` asks brokers what groups have committed.
- `money.Move`: transactions over tables with locks, which move money between rows.
- `leader.Lead`: a controller that is killed or frozen at a point (`points`). `leaders` has the controllers of a
  run.
- `steady.Steady`: a client in the test's own process, for tests of deadlines and delays.
- `crew.Crew`: starts the actors, replaces what is killed, scales the streams, and ends the run.

**The record.** Each process writes a history (`checker.recorder.Recorder`) of what it asked and what it was
answered; `recording` has the words for that, and `last` reads the log raw at the end. ``python -m checker
FOLDER`` judges the folder: `crew.Crew.judged` fails on any anomaly. `docs/inside/checker.md` lists what an
anomaly is.

**The end** is the same in every run (`crew.Crew.finish`). Writers finish the work in hand. No transaction stays
open, and no native one hangs. Each transaction that was begun is asked for twice, of two leaders; both answers
are final. One more transaction commits. Readers read to the end of the log, and the log is recorded.

**What each folder adds**

- `tests/crash`: kills of a controller at every call that it makes, and at random moments; zombies. Its `oracle`
  judges what clients can't see, so that no history has it: epochs and key ranges, the chain of a stream's
  history, vectors, terms and rounds of the status log, and which producer appended a batch. Its scenarios are
  steps of one client in an order that never varies: a point is met again only if each run makes the same calls.
- `tests/faults`: faults of brokers, coordinators and the network; its controllers are processes of the command
  line.
- `tests/mutants`: planted bugs, and leaders that are cut where the bug does harm.
- `tests/processing`: workers of processors. Its `judging` compares outputs and stores with a fold of the input,
  which depends on what the processor computes; the checker judges only what was consumed.
"""
