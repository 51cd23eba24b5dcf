"""Defaults, time-outs and pauses of clients and tools, in seconds unless a name says otherwise.

Here are values that a caller may change, that several packages use, or that decide how long a user waits. A
constant that only one function needs is next to that function; bounds of the product are in `limits`. This module
imports nothing, so that a shell's completion is fast.
"""

from __future__ import annotations

# -- clients ----------------------------------------------------------------------------------------------

# One call of a client, with all commands that it sends and repeats.
TIMEOUT_S = 30.0
# A transaction whose client is silent for this long is aborted. A client sends three heartbeats in that time.
KEEPALIVE_S = 30.0
# Events of a transaction up to this size are sent in one command; more events are written to journals.
ONE_SHOT_BYTES = 256 << 10
# The time for compacting a table, which writes the whole table again.
COMPACT_S = 86_400.0
# A time that another process states may be this far ahead of this machine's clock.
MAX_CLOCK_SKEW_S = 10.0

# A command that was refused for now is sent again after these pauses.
FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 1.0
# A command without an answer is sent again after these pauses, so that a controller that has failed over reads it.
FIRST_REPEAT_S = 2.0
LONGEST_REPEAT_S = 10.0

# A touch waits for segments of an exclusive stream for this long at a controller; then the client asks again.
LOCK_WAIT_MS = 5_000

# A session in the background sends its rows after this time, or as soon as they fill a request.
SESSION_FLUSH_S = 0.05
# The requests of a session that are under way, each following the one before it.
SESSION_IN_FLIGHT = 8
# The bytes of rows that a session holds; with more, `apply` waits, or raises an error.
SESSION_BYTES = 32 << 20
# The errors that a session keeps for `flush`. Further ones are only counted.
SESSION_ERRORS = 1_000
# How long a write waits while a session asks again for a stream's settings, and the pause after no answer.
SESSION_ASK_S = 0.5
SESSION_ASK_AGAIN_S = 30.0

# -- commits ----------------------------------------------------------------------------------------------

# A commit waits until the journals cover its receipts, up to `limits.MAX_WAIT_MS` and within its time-out. This
# share of the time-out is reserved for asking for the outcome if no answer comes.
RESOLVE_SHARE = 1 / 3
# The controller stops waiting this long before the client does, so that its refusal still arrives.
LEAST_MARGIN_S = 0.3
MOST_MARGIN_S = 2.0
# `finished` asks again for the states of transactions after these pauses.
FIRST_LOOK_S = 0.02
LONGEST_LOOK_S = 1.0

# -- transactions over tables -----------------------------------------------------------------------------

# `transact` calls its function again after these pauses, when locks break. With 0.25 s, one of 16 clients that
# wrote the same rows committed nothing.
FIRST_TRANSACT_PAUSE_S = 0.004
LONGEST_TRANSACT_PAUSE_S = 0.032
# … or when an older transaction has a segment of an exclusive stream.
LONGEST_LOCKED_PAUSE_S = 0.25
# A commit that changes rows by `add`, `min` or `max` is sent again after these pauses, when it has to revalidate.
FIRST_CHANGE_PAUSE_S = 0.001
LONGEST_CHANGE_PAUSE_S = 0.064

# After its locks broke at a row, `transact` waits up to this long for a turn there.
TURN_WAIT_S = 10.0
# A row at which locks broke counts as hot for this long: calls of `transact` enter the chain before they read it.
HOT_ROW_S = 0.5
# How many commits of a chain at a hot row one turn may have, while calls of other clients wait.
CHAIN_TURN = 4
# A controller that knows no turns is asked for one again after this time.
NO_TURNS_S = 60.0

# A processor's batch is handled again after these pauses, when its locks break.
FIRST_CONFLICT_PAUSE_S = 0.004
LONGEST_CONFLICT_PAUSE_S = 0.5
# At most one conflict of each table in this time is logged as INFO, others as DEBUG.
CONFLICT_LOG_S = 10.0

# -- processors -------------------------------------------------------------------------------------------

TASKS = 16
# A worker gathers events for one commit up to this time, or this many bytes. A longer interval makes fewer commits.
COMMIT_INTERVAL_S = 0.1
CUT_BYTES = 8 << 20
# A worker that derives a table has these instead. A commit of so few bytes is one command; after a full batch the
# next one may have twice as many.
DERIVE_INTERVAL_S = 0.02
DERIVE_BYTES = ONE_SHOT_BYTES // 2
# A handler that fails is called again this many times, before a dead letter is written or the worker stops.
HANDLER_RETRIES = 2
# This many `async` handlers of a worker run concurrently.
HANDLER_CONCURRENCY = 64
# A worker has this many threads at most; a slow event then delays its own task alone.
HANDLER_THREADS = 1
# A worker that is silent for this long loses its tasks to others of its group.
SESSION_S = 6.0

# -- Spark and ledgers ------------------------------------------------------------------------------------

SPARK_TIMEOUT_S = 60.0
# The keepalive of a job's transaction: longer than a client's, because a busy driver may send heartbeats late.
SPARK_KEEPALIVE_S = 300.0
# A task reads this many offsets in 1 to 2 s, ten times as long as it takes to start.
SPARK_TASK_ROWS = 1_000_000
# `Ledger.recover` ends transactions older than this: younger transactions may still be under way.
LEDGER_AGE_S = 60.0
# One recovery checks at most this many rows.
LEDGER_ROWS = 1000

# -- the command line -------------------------------------------------------------------------------------

# The keepalive of transactions of `load` and `write`, which read files and pipes that may be slow.
TOOL_KEEPALIVE_S = 60.0
# `doctor` compares this machine's clock with the controllers', and warns or fails from these differences on.
CLOCK_WARN_S = 1.0
CLOCK_BAD_S = MAX_CLOCK_SKEW_S
# How long `controller` keeps the outcome of a transaction.
OUTCOME_RETENTION_S = 7 * 86_400.0
