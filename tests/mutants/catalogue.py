"""All planted bugs: each breaks one rule that the design rests on, and the suites must find it.

`docs/inside/mutants.md` says which judges found which, and within how many seeds. ``scripts/simulate --mutants``
and ``scripts/mutants`` look for all of them; `tests/sim/test_mutants.py` for some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from tests.mutants import (
    across,
    asynchronous,
    batches,
    clients,
    decisions,
    derived,
    holds,
    journals,
    merges,
    overlaps,
    plays,
    prepared,
    rounds,
    segments,
    tables,
    tasks,
    topics,
)
from tests.sim.weather import HOUR

Plant = Callable[[], AbstractContextManager[object]]
# Errors of the planted code itself, and not of what it breaks.
UNFIT = ("TypeError: ", "AttributeError: ", "NameError: ")
CARRYING = {"chunk_bytes": 250, "scale_s": 0.7}
# … by leaders that die in the middle of it.
CARRIED_ON = CARRYING | {
    "chunk_bytes": 60, "director_s": 2.0, "crash": 0.002, "machines": 2, "jobs": 8, "linger": 0.8,
}  # fmt: skip
CLEANING = {"cleaning": True, "linger": 0.8}
SAFE = {"safe_s": 0.3, "readers": 3}
# Nothing goes wrong but what is said besides, and much is done.
CALM = {
    "crash": 0, "freeze": 0, "slow_lead": 0, "delay": 0, "uncertain": 0, "unavailable": 0, "late_end": 0,
    "full_disk": 0, "slow_disk": 0, "checkpoint_loss": 0, "retain_s": 0, "scale_s": 0, "cleaning": False,
    "readers": 0, "control_partitions": 1, "machines": 2, "clients": 3, "jobs": 8,
}  # fmt: skip
# A leader takes A and comes to B long after: meanwhile another one led, and still holds A.
TORN = CALM | {
    "torn_lead": 0.5,
    "torn_lead_s": 2.0,
    "director_s": 2.0,
    "marker_delay_s": 0.0,
    "plain_s": 0.5,
}
# A zombie reads on: it stood still where it reads, while another one led, and leads again.
BLIND = CALM | {"blind": 0.05, "freeze_s": 1.0, "director_s": 3.0, "linger": 0.8}
# Heartbeats wait unread: a leader without a rival stands still for longer than a keepalive, and reads in pieces.
BEHIND = CALM | {"machines": 1, "freeze": 0.003, "freeze_s": 6.0, "small": True, "linger": 0.8}
LANES: dict[str, float] = {"lanes": 2}
BLOCKING: dict[str, float] = {"rights_s": 1.0}
# What is refused would do if it came again, and another one leads soon.
REFUSALS: dict[str, float] = {"refusals": 0.5, "director_s": 2.0, "clients": 3}
NUMBERED = CALM | {"numbered": 1.0}
# Commits follow others in another scope, and clocks differ; or they wait, and clocks are right enough.
HOPPING = CALM | {
    "hop_s": 0.5, "control_partitions": 2, "skew_s": 3.0, "clients": 1, "machines": 3, "director_s": 2.0,
    "jobs": 4, "retention_s": 7 * 86_400.0,
}  # fmt: skip
# Commits wait for journals that are read late; meanwhile successors ask the writers for receipts again.
REPEATED = CALM | {"repeats": 2.0, "hide_journals": 0.998, "linger": 0}
LIVING = CALM | {"lives_s": 0.1, "clients": 1, "jobs": 1}
COPIED = LIVING | {"double_command": 0.1, "late_command": 0.05, "lanes": 2, "rights_s": 1.0}
WAITING = HOPPING | {"error_s": 0.5, "skew_s": 0.5, "jump_s": 0}
PLAINLY = CALM | {"plain_s": 0.5}
BURSTS: dict[str, float] = {"plain_s": 0.5, "readers": 2}
# Rounds of one leader follow each other in the same partitions, before the markers of the former ones are there.
MARKERS = CALM | {
    "marker_delay_s": 0.5, "chunk_bytes": 16 << 20, "streams": 1, "machines": 1, "plain_s": 0.3,
}  # fmt: skip
LOSING = {"lose_s": 3.0, "linger": 0.8}
# Topics are deleted, and there is little load: nothing is written to some of the streams.
IDLE = CALM | {"lose_s": 2.0, "clients": 1, "jobs": 1, "work_s": 20.0, "lag_s": 0}
LOSING_SOON = LOSING | {"lose_s": 1.0}
LAGGING = {"lag_s": 1.0, "linger": 0.8}
# One stream is in trouble for long, and little else is wrong: what others feel of it comes of that.
LEADERLESS = CALM | {"leaderless_s": 2.0, "lose_s": 0, "lag_s": 0}
REFUSING = CALM | {"refusing_s": 2.0, "lose_s": 0, "lag_s": 0}
FEW_REPLICAS = CALM | {
    "few_replicas_s": 2.0, "lose_s": 0, "lag_s": 0, "machines": 1, "director_s": 1000.0,
}  # fmt: skip
# … and a native transaction ends there at that moment: its marker is lost.
LOST_MARKERS = LEADERLESS | {"lose_markers": 1.0}
# Workers steal tasks from each other; and what they commit is staged.
STEALING = {"workers": 3, "retain_s": 0, "scale_s": 0.7, "worker_freeze": 0.006}
MOVING = STEALING | {"chunk_bytes": 250}
# Processes with replicas of two tables, and little besides.
OVERLAP_TESTS = "tests/controller/test_overlap.py"
DERIVED = "tests/tables/test_derivations.py"
TOTALS = "tests/tables/test_totals.py"
ASYNCHRONOUS = "tests/processing/test_derived.py"
IN_MEMORY = "tests/tables/test_transactions.py"
HOLDING = "tests/core/test_holding.py"
ACROSS = "tests/core/across/test_leaders.py"
ONE_SHOTS = "tests/core/across/test_one_shots.py"
LOCKS = "tests/core/across/test_locks.py"
LATER_TESTS = "tests/core/across/test_later.py"
HISTORIES = "tests/core/across/test_random_leaders.py::test_transactions_are_whole_everywhere"
SNAPSHOTS = "tests/client/test_across_snapshots.py"
TABLED = CALM | {"tables": 3, "clients": 1, "jobs": 1, "lose_s": 0, "lag_s": 0}
COUNTED = TABLED | {"tables": 0, "counters": 3}
CHAINED = TABLED | {"tables": 0, "chains": 3}
# Processes write a source of derived tables; and one that switches a version sleeps before it ends the former.
DERIVING = TABLED | {"tables": 0, "derivers": 3}
# Workers derive a table after the commits of its source.
LATER = TABLED | {"tables": 0, "later": 2}
SLEEPING = DERIVING | {"client_freeze": 0.01, "freeze_s": 3.0}
# One stream is in trouble: rounds with its commits fail, and their leader continues.
COUNTED_IN_TROUBLE = COUNTED | {
    "leaderless_s": 2.0, "clients": 3, "jobs": 8, "bursts": 0.6, "director_s": 1000.0,
}  # fmt: skip
FREEZING = TABLED | {"chunk_bytes": 100}  # … of which all are carried that go by journals
PREPARED = {"prepared": 1.0, "linger": 0.8}
# Retention deletes up to where readers are, and cuts the history while they hold fetched events.
RETAINING = CALM | {
    "readers": 6, "retain_s": 0.2, "scale_s": 0.5, "cleaning": True, "small": True, "streams": 1,
    "machines": 1, "clients": 1, "client_freeze": 0.005, "delay": 0.2, "delay_s": 0.05, "work_s": 10.0,
}  # fmt: skip
GREEDY = CALM | {"greedy_s": 1.0, "clients": 1, "lose_s": 0, "lag_s": 0}
STALE = CALM | {"stale_reads_s": 2.0, "readers": 3, "lose_s": 0, "lag_s": 0, "streams": 1}
# Rounds follow each other without a pause; or their leaders don't get the answers, or streams refuse data.
OVERLAPPING = CALM | {"bursts": 2.0, "overlap_s": 1.0, "lose_s": 0, "lag_s": 0}
UNANSWERED = OVERLAPPING | {"no_answer": 0.05, "late_answer": 0.3, "crash": 0.002}
REFUSED = OVERLAPPING | {"refusing_s": 2.0, "few_replicas_s": 2.0}
# Transactions over control partitions: leaders die, messages are lost, late or doubled, and merges are staged.
# Faults begin once the streams are made: to make them among faults would take longer than the faults last …
OVER = CALM | {
    "across": True, "control_partitions": 2, "streams": 3, "chunk_bytes": 500, "prepared": 0.3, "crash": 0.003,
    "lose_command": 0.05, "double_command": 0.1, "late_command": 0.15, "bursts": 0.6, "skew_s": 2.0, "tight": False,
    "lose_s": 0, "lag_s": 0, "jobs": 5, "clients": 3, "work_s": 30.0, "gentle": True, "native_timeout_s": 10.0,
}  # fmt: skip
# … while streams are scaled, or safe times are asked for.
OVER_SCALED = OVER | {"scale_s": 0.7, "linger": 0.8, "prepared": 0.0}
OVER_READ = OVER | {"safe_s": 0.1, "readers": 2}
# … where transactions that meet lock rows at both control partitions.
OVER_LOCKED = OVER | {"tables": 3, "clients": 1, "jobs": 2, "prepared": 0.0}
# … while the cluster grows.
GROWING = OVER | {"grow_s": 1.0, "lanes": 1, "work_s": 40.0, "director_s": 6.0}
READING = {"readers": 3, "scale_s": 0.7, "client_crash": 0.0}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug.

    ``plant``: a context in which the bug is there, in this process; its docstring says what is broken.
    ``simulated``: whether it can occur in the simulator. ``quick``: so soon that a test looks for it,
    from ``seed`` on, at which it was found when this was written (with ``PYTHONHASHSEED=0``).
    ``weather``: settings of the simulation that bring it out sooner, on top of what each seed draws.
    ``by_clients``: it is in the library of readers and writers, not in controllers.
    ``broker``: what brings it out on a real broker, one of `tests.mutants.workload.Trial`'s names; empty where
    that is not known (`docs/inside/mutants.md` says why).
    ``suite``: the file of tests that finds it, where neither simulator nor workload can.
    ``play``: the exact order of events in which it does harm; an `AssertionError` under the bug.
    """

    name: str
    plant: Plant
    simulated: bool = True
    quick: bool = False
    seed: int = 0
    weather: Mapping[str, float] = field(default_factory=dict)
    by_clients: bool = False
    broker: str = ""
    play: Callable[[], None] | None = None
    suite: str = ""

    @property
    def breaks(self) -> str:
        """What it breaks, in words."""
        return (self.plant.__doc__ or "").split("\n")[0]


CATALOGUE: tuple[Mutant, ...] = (
    # -- durability
    Mutant("answer before the commit", rounds.answer_early, quick=True, broker="kills"),
    Mutant("answer after an uncertain commit", rounds.answer_unsure, quick=True, seed=1),
    Mutant("offsets are foreseen and not checked", rounds.unchecked_guess, quick=True, weather=MARKERS),
    Mutant("table before the commit", rounds.table_early, quick=True, seed=1, broker="unborn"),
    Mutant("position ahead of the rows", rounds.position_ahead, quick=True, seed=2, broker="passed"),
    Mutant("merged, but logged a round later", rounds.rows_later, quick=True, seed=1, broker="kills"),
    # -- rounds that overlap
    Mutant("the next round ignores the former's memory", overlaps.no_drafts, simulated=False,
           suite=OVERLAP_TESTS),
    Mutant("changes of two rounds are written with the first", overlaps.unsealed, quick=True,
           weather=UNANSWERED,
           suite=OVERLAP_TESTS),
    Mutant("commands of a round under way are decided again", overlaps.decided_twice, simulated=False,
           suite=OVERLAP_TESTS),
    Mutant("a refused round's successor is written", overlaps.written_all_the_same, weather=REFUSED,
           suite=OVERLAP_TESTS),
    Mutant("two rounds are in flight", overlaps.two_in_flight, seed=22, weather=UNANSWERED),
    Mutant("answers of the next round leave early", overlaps.answered_early, quick=True, weather=UNANSWERED,
           suite=OVERLAP_TESTS),
    Mutant("memory follows a round under way", overlaps.followed_early, weather=REFUSED, suite=OVERLAP_TESTS),
    # -- leading
    Mutant("no TERM record", rounds.no_term, weather=TORN,
           play=plays.a_rival_leads_between_a_and_b),
    Mutant("only A is fenced", rounds.one_fenced),
    Mutant("B is fenced late", rounds.late_b, broker="zombies"),
    Mutant("carriers are fenced late", rounds.late_carriers, weather=CARRYING,
           play=plays.a_carrier_outlives_its_leader),
    Mutant("folded before the fences only", rounds.fold_once, seed=24, broker="rivals"),
    Mutant("acts before TERM", rounds.act_before_term, broker="rivals"),
    Mutant("silence judged too early", rounds.hasty_staleness, weather=BEHIND,
           play=plays.heartbeats_wait_unread),
    Mutant("keepalives do not begin afresh at takeover", rounds.old_keepalives, quick=True, seed=1),
    # -- answers
    Mutant("RESOLVE does not log ABORTED", rounds.resolve_unlogged, quick=True, seed=13),
    Mutant("safe times are not logged", rounds.safe_unlogged, weather=SAFE),
    Mutant("times to come are called safe", rounds.safe_ahead, weather=SAFE),
    Mutant("stale snapshot", rounds.safe_stale, weather=SAFE, broker="steady"),
    # -- prepared ones
    Mutant("silence aborts a prepared one", prepared.goes_stale, quick=True, seed=2, weather=PREPARED),
    Mutant("a prepared one's name is superseded", prepared.superseded, weather=PREPARED),
    Mutant("a prepared one is lost with a stream", prepared.lost_with_a_stream,
           weather=PREPARED | LOSING),
    Mutant("all of a prepared one is left out with a stream", prepared.all_is_left_out,
           weather=PREPARED | LOSING),
    Mutant("what a prepared one leaves out is not counted", prepared.uncounted, quick=True, seed=8,
           weather=PREPARED | LOSING_SOON),
    Mutant("a refused merge aborts a prepared one", prepared.refused_and_aborted,
           weather=PREPARED | {"small_limit_s": 2.0}),
    Mutant("what gives way with positions is committed", prepared.given_way_is_committed, weather=TABLED,
           suite="tests/core/test_one_commit.py"),
    Mutant("tasks prove a one-shot with a name", prepared.tasks_prove_a_named_one, weather=TABLED,
           suite="tests/core/test_one_commit.py"),
    Mutant("locks of a prepared one are not frozen", prepared.locks_not_frozen, weather=TABLED,
           suite="tests/core/test_one_commit.py"),
    Mutant("preparing looks at what others read alone", prepared.its_reads_ignored, simulated=False,
           suite="tests/core/test_one_commit.py"),
    Mutant("preparing looks at what others write alone", prepared.its_writes_ignored, simulated=False,
           suite="tests/core/test_one_commit.py"),
    Mutant("locks of a prepared one hold for ever", prepared.waits_for_ever, weather=TABLED,
           suite="tests/core/test_one_commit.py"),
    Mutant("tasks of a prepared one are not in progress", prepared.tasks_not_in_progress, weather=TABLED,
           suite="tests/core/test_one_commit.py"),
    Mutant("a prepared one is fenced when it commits", prepared.fenced_when_it_commits, weather=TABLED,
           suite="tests/core/test_one_commit.py"),
    Mutant("a ledger takes no answer for no commit", prepared.no_answer_is_no_commit,
           weather=PREPARED, by_clients=True),
    Mutant("a ledger's rows go too early", prepared.rows_go_too_early, weather=PREPARED,
           by_clients=True),
    # -- what a commit takes
    Mutant("late writes are taken", decisions.late_writes),
    Mutant("a dead attempt's writes are counted", decisions.zombie_writers, broker="steady"),
    Mutant("an outcome names others than were taken", decisions.inexact_writers, simulated=False,
           play=plays.some_writers_are_left_out),
    Mutant("a repeated commit moves its deadline", decisions.moving_deadline, simulated=False,
           play=plays.a_commit_is_sent_again_and_again),
    Mutant("a commit is in doubt only after it was sent", clients.doubt_after_sending,
           quick=True, seed=8, weather={"interrupt": 0.05}, by_clients=True,
           play=plays.an_interrupt_ends_a_commit),
    Mutant("another commit's outcome is taken for one's own", decisions.others_receipts, quick=True,
           seed=52, weather={"two_committers": 1.0}),
    Mutant("receipts are compared by sequence", decisions.by_sequence, weather=REPEATED,
           suite="tests/core/test_commit.py"),
    Mutant("tries of a command are not counted", decisions.uncounted_tries, simulated=False,
           play=plays.a_command_can_not_be_decided),
    # In the simulator another check comes first: a false receipt does not cover the true one before it.
    Mutant("checksums are not compared", decisions.no_checksum, simulated=False,
           suite="tests/core/test_commit.py"),
    Mutant("counts are not compared", decisions.no_count),
    Mutant("a run is dropped from a merge", decisions.drop_a_run, quick=True, seed=1),
    Mutant("timestamps by the wall clock alone", decisions.wall_clock_only, quick=True),
    Mutant("what was seen is ignored", decisions.seen_ignored, quick=True, weather=HOPPING),
    Mutant("what was seen raises without bound", decisions.seen_without_bound, quick=True, weather=HOPPING),
    Mutant("what writers saw is not carried", decisions.writers_seen_nothing, quick=True, seed=18, weather=HOPPING),
    Mutant("tokens tell of their transaction's begin", decisions.bare_tokens, quick=True, weather=HOPPING,
           by_clients=True),
    Mutant("answers don't wait for clocks", decisions.no_commit_wait, quick=True, seed=14, weather=WAITING),
    Mutant("committed names are not looked up", decisions.forget_names, quick=True, seed=25),
    Mutant("a series' highest number is not looked up", decisions.forget_series, quick=True, seed=25,
           broker="steady"),
    Mutant("numbers below the highest are taken", decisions.low_numbers, weather=NUMBERED,
           play=plays.a_number_comes_too_late),
    # -- what belongs to whom
    Mutant("a repeated Begin needs no secret", decisions.any_secret, simulated=False,
           play=plays.a_stranger_begins_again, suite="tests/core/test_secrets.py"),
    *(Mutant(name, plant, simulated=False, play=plays.tokens_that_are_not_good_enough,
             suite="tests/core/test_secrets.py")
      for name, plant in (("a token's MAC is not looked at", decisions.no_mac),
                          ("a token's rights are not looked at", decisions.no_right),
                          ("a token's end is not looked at", decisions.no_end),
                          ("a token's lane is not looked at", decisions.no_lane))),
    Mutant("an answer to another command is believed", clients.any_answer, simulated=False,
           by_clients=True, play=plays.an_answer_to_another_command,
           suite="tests/client/test_protocol.py"),
    # -- lanes
    Mutant("an unblocked lane's backlog is run", decisions.backlog, quick=True, seed=1,
           weather=LANES | BLOCKING, play=plays.a_lane_is_blocked_for_a_while),
    Mutant("all lanes are answered in one topic", decisions.answers_to_all, quick=True, weather=LANES,
           play=plays.a_lane_is_answered),
    Mutant("lanes' positions are not logged", decisions.positions_unlogged, quick=True,
           seed=24, weather=LANES | REFUSALS, play=plays.a_refused_lane_gets_its_right),
    Mutant("silence is judged by one lane", decisions.open_alone_is_read, weather=LANES | BEHIND,
           play=plays.heartbeats_wait_in_a_lane),
    # -- merges
    Mutant("a merge is dropped", merges.drop_a_merge, quick=True, seed=1, broker="steady"),
    Mutant("a part of a merge is dropped", merges.drop_a_part, quick=True, seed=2, broker="steady"),
    Mutant("a merge is done twice", merges.merge_twice, quick=True, seed=1, broker="steady"),
    Mutant("runs are merged in the wrong order", merges.merge_out_of_order, broker="steady"),
    Mutant("an aborted transaction is shown", merges.show_an_aborted, quick=True,
           seed=8, broker="steady"),
    Mutant("the vector of a commit is one short", merges.cut_short, quick=True,
           broker="steady"),
    Mutant("the vector of a commit lacks a partition", merges.cut_lacks_a_partition, quick=True,
           seed=1, broker="steady"),
    # -- epochs
    Mutant("the active epoch is not duplicated", merges.no_way_back, quick=True, broker="steady"),
    Mutant("merged by partition, not by number", merges.by_partition, quick=True, seed=1,
           broker="steady"),
    Mutant("one of many collated transactions is merged", merges.one_of_many, quick=True, seed=10,
           broker="steady"),
    Mutant("a sealed end counts the marker", merges.behind_the_marker, quick=True,
           broker="steady"),
    Mutant("a segment is sealed before its last event", merges.sealed_too_early, quick=True,
           broker="steady"),
    Mutant("a former layout is forgotten too early", merges.forget_layouts, quick=True, seed=1),
    Mutant("former layouts are kept", merges.keep_layouts, quick=True, seed=1),
    Mutant("a touch is answered with the active layout", merges.answer_active, quick=True, seed=1),
    Mutant("a duplicate is pinned as reference epoch", merges.pin_the_epoch, quick=True),
    Mutant("segment numbers are used again", merges.numbers_again, quick=True, seed=1),
    # -- merges that are staged
    Mutant("carried partitions are not reserved", merges.nothing_reserved, weather=CARRYING),
    Mutant("a chunk is carried again", merges.carry_again, weather=CARRIED_ON, broker="carrying"),
    Mutant("a run is left out of what is carried", merges.skip_a_run, weather=CARRIED_ON,
           broker="carrying"),
    Mutant("a carrier's cursor is logged a chunk late", merges.carry_row_late, weather=CARRIED_ON,
           broker="carrying"),
    Mutant("the table's position moves on while carrying", merges.position_moves_on,
           weather=CARRYING),
    Mutant("carried on before the journals are read", merges.begin_unread, weather=CARRIED_ON),
    # -- waits for prepare timestamps
    Mutant("nobody waits for a prepare timestamp", holds.nobody_waits, quick=True, weather=OVER, suite=HOLDING),
    Mutant("commits of one timestamp in any order", holds.ties_are_free, simulated=False, suite=HOLDING),
    Mutant("all streams are held", holds.all_streams_are_held, simulated=False, suite=HOLDING),
    Mutant("who waits takes no timestamp", holds.no_timestamp_is_taken, simulated=False, suite=HOLDING),
    Mutant("taken timestamps are kept", holds.timestamps_are_kept, simulated=False, suite=HOLDING),
    Mutant("a held time is safe", holds.each_time_is_safe, weather=OVER_READ, suite=HOLDING),
    Mutant("epochs are later than held commits", holds.epochs_come_late, weather=OVER_SCALED, suite=HOLDING),
    Mutant("times ahead are not checked", holds.what_comes_is_not_asked, weather=OVER, suite=HOLDING),
    Mutant("prepare timestamps are given", holds.promises_are_timestamps, simulated=False, suite=ACROSS),
    Mutant("locks wait for no prepare timestamp", holds.locks_wait_for_nobody, weather=OVER_LOCKED, suite=HOLDING),
    Mutant("newest commits of held tables", holds.held_tables_are_told, simulated=False, suite=HOLDING),
    Mutant("a successor holds nothing", holds.successors_hold_nothing, weather=OVER, suite=HOLDING),
    Mutant("messages leave before their round", across.sent_before_the_commit, quick=True, weather=OVER),
    Mutant("old questions count", across.old_questions_count, weather=OVER, suite=ACROSS),
    Mutant("commands before messages", across.commands_come_first, simulated=False,
           suite="tests/controller/test_across.py"),
    Mutant("freed after the commands", across.freed_after_the_commands, simulated=False,
           suite="tests/controller/test_across.py"),
    Mutant("a participant's time counts", across.a_participants_time_counts, quick=True, weather=OVER,
           suite=HISTORIES),
    Mutant("staged with the vote", across.staged_with_the_vote, weather=OVER, suite=HISTORIES),
    Mutant("staged parts date themselves", across.staged_parts_date_themselves, weather=OVER, suite=LATER_TESTS),
    Mutant("what is decided later is aborted", across.what_is_decided_later_is_aborted, simulated=False),
    Mutant("asked before all have reopened", across.asked_before_all_have_reopened, weather=OVER, suite=ACROSS),
    Mutant("prepared before all have voted", across.prepared_before_all_have_voted, weather=OVER,
           suite=LATER_TESTS),
    Mutant("committed without a word", across.committed_without_a_word, weather=OVER, suite=LATER_TESTS),
    Mutant("late commits need no promise", across.late_commits_need_no_promise, simulated=False,
           suite=LATER_TESTS),
    Mutant("votes wait for holds", across.votes_wait_for_holds, simulated=False, suite=ACROSS),
    Mutant("timestamps of any control partition", across.timestamps_of_any_partition, weather=OVER, suite=ACROSS),
    Mutant("a message brings any time", across.any_time_is_accepted, simulated=False, suite=ACROSS),
    Mutant("the lowest answer is the snapshot", across.the_lowest_answer_is_the_snapshot, simulated=False,
           by_clients=True, suite=SNAPSHOTS),
    Mutant("records speak for other streams", across.records_speak_for_other_streams, simulated=False,
           by_clients=True, suite="tests/reading/test_positions.py"),
    Mutant("late followers are believed", across.late_followers_are_believed, simulated=False, by_clients=True,
           suite="tests/reading/test_retention.py"),
    Mutant("changes are no locks", across.changes_are_no_locks, simulated=False, suite=LOCKS),
    Mutant("commands grow first", across.commands_grow_first, simulated=False,
           suite="tests/contract/test_declarations.py"),
    Mutant("refused one-shots are forgotten", across.refused_ones_are_forgotten, weather=OVER, suite=ONE_SHOTS),
    Mutant("frozen locks refuse both one-shots", across.frozen_locks_refuse_both, simulated=False, suite=LOCKS),
    Mutant("nobody asks for decisions", across.nobody_asks_for_decisions, weather=OVER, suite=ONE_SHOTS),
    Mutant("unknown one-shots are not answered", across.unknown_ones_are_not_answered, weather=OVER,
           suite=ONE_SHOTS),
    Mutant("unknown ids are not used up", across.unknown_ids_are_not_used_up, weather=OVER, suite=ONE_SHOTS),
    Mutant("any vote counts", across.any_vote_counts, quick=True, seed=4, weather=OVER, suite=ACROSS),
    Mutant("promised times are ignored", across.promises_are_ignored, weather=OVER, suite=ACROSS),
    Mutant("lost streams are promised", across.lost_streams_are_promised, simulated=False, suite=ACROSS),
    Mutant("a refused commit aborts", across.a_refusal_aborts, simulated=False, suite=ACROSS),
    Mutant("a refused commit takes nothing back", across.refusals_take_nothing_back, weather=OVER, suite=ACROSS),
    Mutant("participants are enlisted at any time", across.enlisted_at_any_time, weather=OVER, suite=ACROSS),
    Mutant("over before all are done", across.over_before_all_are_done, weather=OVER, suite=ACROSS),
    Mutant("unknown aborts are forgotten", across.unknown_aborts_are_forgotten, weather=OVER, suite=ACROSS),
    Mutant("no message is forged", across.nothing_is_forged, simulated=False, suite=ACROSS),
    Mutant("messages are sent once", across.sent_once, weather=OVER, suite=ACROSS),
    Mutant("questions prove themselves", across.questions_prove_themselves, simulated=False, suite=ONE_SHOTS),
    Mutant("one-shots are logged at once", across.parts_are_logged_at_once, simulated=False, suite=ONE_SHOTS),
    Mutant("early questions are dropped", across.early_questions_are_dropped, simulated=False, suite=ONE_SHOTS),
    Mutant("one-shots begin again", across.repeated_commands_begin_again, weather=OVER, suite=ONE_SHOTS),
    Mutant("refused one-shots stay open", across.refused_one_shots_stay_open, weather=OVER, suite=ONE_SHOTS),
    Mutant("one-shots join what rolls", across.one_shots_join_what_rolls, simulated=False, suite=ONE_SHOTS),
    Mutant("locked tables hold nothing", across.locked_tables_hold_nothing, weather=OVER_LOCKED, suite=LOCKS),
    Mutant("all that meet wait", across.all_that_meet_wait, weather=OVER_LOCKED, suite=LOCKS),
    Mutant("all that meet give way", across.all_that_meet_give_way, weather=OVER_LOCKED, suite=LOCKS),
    Mutant("votes meet no staged merge", across.staged_merges_are_not_met, weather=OVER_LOCKED, suite=LOCKS),
    Mutant("a coordinator's locks are not frozen", across.own_locks_are_not_frozen, weather=OVER_LOCKED,
           suite=LOCKS),
    Mutant("waiting commits keep times", across.waiting_commits_keep_their_times, weather=OVER_LOCKED, suite=LOCKS),
    Mutant("reopened locks stay frozen", across.reopened_locks_stay_frozen, simulated=False, suite=LOCKS),
    # -- journals
    Mutant("a zombie writes its journal index", journals.zombie_index, weather=BLIND,
           play=plays.a_zombie_reads_on),
    Mutant("plain writes are lost", journals.plain_lost, quick=True, weather=BURSTS, broker="steady"),
    Mutant("plain writes are committed twice", journals.plain_twice, quick=True, weather=BURSTS,
           broker="steady"),
    Mutant("plain writes are misplaced", journals.plain_misplaced, quick=True, weather=BURSTS,
           broker="steady"),
    Mutant("plain writes are committed backwards", journals.plain_backwards, weather=PLAINLY,
           broker="steady", play=plays.plain_writes_wait_together),
    Mutant("how far plain writes are committed is logged late", journals.plain_position_late,
           quick=True, seed=18, broker="kills"),
    Mutant("the low water is too high", journals.low_water_too_high, weather=CLEANING,
           broker="steady"),
    Mutant("journals are deleted above the low water", journals.cut_above, weather=CLEANING,
           broker="steady"),
    Mutant("a history is cut above what is left", journals.history_cut_above, simulated=False,
           suite="tests/controller/test_histories.py"),
    Mutant("a missing vector is taken for what its commit moved", journals.vector_not_completed,
           simulated=False, by_clients=True, suite="tests/controller/test_histories.py"),
    # -- processors
    *(Mutant(name, plant, weather=STEALING, quick=quick, seed=seed) for name, plant, quick, seed in (
        ("any owner may commit", tasks.any_owner, True, 6),
        ("sequences are not compared", tasks.any_sequence, False, 0),
        ("a commit is not judged when it is decided", tasks.judged_early_only, True, 6),
        ("one task of a commit moves", tasks.one_task_moves, False, 0),
        ("state goes by key", tasks.state_by_key, False, 0),
        ("a state's sequence is not told", tasks.state_untold, True, 6))),
    *(Mutant(name, plant, weather=MOVING, quick=quick, seed=seed) for name, plant, quick, seed in (
        ("two commits of a task are in flight", tasks.two_in_flight, False, 7),
        ("a decided commit does not show", tasks.decided_unmarked, False, 0),
        ("positions move with the decision", tasks.moved_when_decided, False, 0))),
    *(Mutant(name, plant, weather=MOVING, suite="tests/core/test_ownership.py") for name, plant in (
        ("what is aborted keeps its tasks", tasks.not_given_back),
        ("a take is answered too early", tasks.taken_too_early))),
    *(Mutant(name, plant, weather=STEALING, quick=quick, seed=seed, by_clients=True)
      for name, plant, quick, seed in (
        ("a commit that was left is given again", tasks.given_again, True, 6),
        ("positions inside a commit are its beginning", tasks.whole_commits, False, 0),
        ("a rolled commit lacks a segment", tasks.segment_skipped, True, 3),
        ("a stretch is ahead of what was given", tasks.ahead_of_what_was_given, True, 24),
        ("a stretch forgets a task", tasks.a_task_is_forgotten, False, 0),
        ("events without a key are dealt by count", tasks.null_keys_by_count, False, 0))),
    *(Mutant(name, plant, simulated=False, suite="tests/processing/test_altered.py") for name, plant in (
        ("positions keep the numbers of former inputs", tasks.numbers_of_former_inputs),
        ("an altered processor keeps its owners", tasks.owners_of_former_inputs))),
    Mutant("a worker of former inputs works on", tasks.any_inputs, simulated=False, by_clients=True,
           suite="tests/processing/test_altered.py"),
    *(Mutant(name, plant, simulated=False, by_clients=clients, suite="tests/processing/test_copies.py")
      for name, plant, clients in (
        ("workers take a copy that is being filled", tasks.copies_for_all, False),
        ("a copier ends a copy that another one began again", tasks.any_copier_ends, False),
        ("a copier does not see that tasks were taken back", tasks.copies_of_two_instants, True),
        ("a copy begins where its original began", tasks.copies_without_positions, True))),
    # -- topics in outside hands
    Mutant("a stream is given up at once", topics.given_up_at_once, weather=LAGGING),
    Mutant("a lost stream's transactions go on", topics.lost_and_going_on, weather=LOSING),
    Mutant("what a lost stream stops is committed elsewhere", topics.finished_elsewhere,
           weather=LOSING_SOON),
    Mutant("a topic made anew is taken for the old one", topics.taken_for_the_old_one,
           weather=LOSING),
    # -- streams that are altered, truncated and deleted
    Mutant("a change is told before it is done", topics.told_before_it_is_done, quick=True,
           weather=LIVING),
    Mutant("a stream is truncated to its end", topics.deleted_to_the_end, quick=True,
           weather=LIVING),
    Mutant("topics of deleted streams stay", topics.topics_stay, quick=True, weather=LIVING),
    Mutant("positions are of any stream of the name", topics.positions_of_any_stream, quick=True,
           weather=LIVING),
    # -- late copies of what sets something
    Mutant("late copies set something", topics.late_copies, quick=True, seed=7, weather=COPIED,
           suite="tests/core/test_copies.py"),
    Mutant("a copy is sent as a new command", topics.copies_know_more, simulated=False,
           by_clients=True, suite="tests/client/test_copies.py"),
    # -- topics in trouble for long
    Mutant("all wait for a stream in trouble", topics.all_wait_for_one, weather=LEADERLESS),
    Mutant("what shares a stream with one in trouble waits", merges.beside_trouble, seed=1,
           weather=CALM | HOUR | {"hour_s": 600.0, "lose_s": 0, "lag_s": 0}),
    Mutant("trouble is taken for loss", topics.trouble_taken_for_loss, weather=LEADERLESS),
    Mutant("every refusal is final", topics.every_refusal_is_final, weather=REFUSING),
    Mutant("busy ids are used again", topics.busy_ids_are_used_again, weather=FEW_REPLICAS),
    Mutant("what lacks a marker stays open", topics.left_open, quick=True, seed=2,
           weather=LOST_MARKERS),
    Mutant("a quiet stream is not looked at", topics.quiet_streams_stay, weather=LOST_MARKERS,
           suite="tests/controller/test_busy_ids.py"),
    Mutant("an idle stream without its topic stays", topics.idle_streams_stay,
           weather=IDLE, suite="tests/controller/test_lost_topics.py"),
    Mutant("carriers never look for lost markers", topics.carriers_never_look,
           weather=LOST_MARKERS | {"chunk_bytes": 250}, suite="tests/controller/test_busy_ids.py"),
    # -- the library of readers and writers
    Mutant("nobody sends what has gathered", clients.nobody_sends, simulated=False,
           by_clients=True, suite="tests/librdkafka/test_command_bus.py"),
    Mutant("of answers that arrive together only one is taken", clients.next_sleeps_on,
           simulated=False, by_clients=True, suite="tests/librdkafka/test_command_bus.py"),
    Mutant("of gathered commands only the last is sent", clients.last_command_alone,
           simulated=False, by_clients=True, suite="tests/librdkafka/test_command_bus.py"),
    Mutant("a snapshot is cut too early", clients.stale_cut, weather=READING, by_clients=True,
           broker="steady"),
    Mutant("a snapshot's streams are cut at different times", clients.uneven_cut,
           weather=READING, by_clients=True, broker="steady"),
    Mutant("ends are not sure", clients.unsure_ends, quick=True, weather=STALE, by_clients=True),
    Mutant("brokers' errors reach the caller", clients.bare_errors, by_clients=True, quick=True, seed=2,
           weather=TABLED | {"leaderless_s": 2.0, "workers": 2}),
    Mutant("a write that is taken says 'call again'", clients.taken_and_refused, quick=True,
           weather=CALM | {"repeats": 1.0}, by_clients=True),
    Mutant("a difference begins too early", clients.early_difference, weather=READING,
           by_clients=True),
    Mutant("the latest is as of the oldest stream", clients.latest_of_the_oldest,
           weather=READING, by_clients=True),
    Mutant("a position skips an event", clients.late_position, weather=READING, by_clients=True),
    Mutant("a copy counts as whole too early", clients.hasty_copy, weather=READING,
           by_clients=True),
    Mutant("segments are read before their predecessors", clients.no_waiting, weather=READING,
           by_clients=True, broker="steady"),
    Mutant("what retention deleted is given as adopted", clients.deleted_are_adopted,
           weather=RETAINING, by_clients=True),
    Mutant("readers read uncommitted", clients.read_uncommitted, simulated=False,
           by_clients=True, broker="kills"),
    Mutant("a group's new partitions are a new group's", clients.partitions_of_a_new_group,
           simulated=False, by_clients=True, suite="tests/behaviour/order/test_groups.py"),
    Mutant("a stale leader moves a reader back", clients.stale_leader_believed, simulated=False,
           by_clients=True, suite="tests/reading/test_feed.py"),
    Mutant("records of others are read", clients.strangers_read, simulated=False,
           by_clients=True, suite="tests/behaviour/order/test_readers.py"),
    # -- tables
    Mutant("locks are not judged", tables.no_validation, weather=TABLED, quick=True, seed=1),
    Mutant("turns at rows outlast commits", tables.turns_outlast_commits, weather=TABLED,
           suite="tests/core/test_row_turns.py"),
    Mutant("turns at rows outlast their client", tables.turns_outlast_clients, simulated=False,
           suite="tests/core/test_row_turns.py"),
    Mutant("a commit is followed before it has come", tables.followed_unseen, weather=CHAINED,
           suite="tests/core/test_followed_rows.py"),
    Mutant("a followed row is not locked", tables.followed_unlocked, weather=CHAINED,
           suite="tests/core/test_followed_rows.py"),
    Mutant("results of uncommitted rows are reported", tables.uncommitted_reported, weather=CHAINED,
           by_clients=True, suite="tests/tables/test_row_chain.py"),
    Mutant("a chain without calls keeps its turn", tables.idle_turns_kept, simulated=False,
           by_clients=True, suite="tests/tables/test_row_chain.py"),
    Mutant("copies of one-shots that follow are forgotten", tables.copies_forgotten, simulated=False,
           by_clients=True, suite="tests/tables/test_row_chain.py"),
    *(Mutant(name, plant, simulated=False, suite="tests/core/test_segment_locks.py")
      for name, plant in (
        ("a segment has two holders", segments.two_holders),
        ("a younger transaction waits for a segment", segments.younger_waits),
        ("those that wait for a segment are passed over", segments.waiting_ones_unseen),
        ("a new leader forgets locked segments", segments.locks_lost),
        ("a segment stays locked", segments.locks_outlast),
      )),
    Mutant("a commit at since breaks a lock", tables.at_since_counts, simulated=False,
           suite="tests/core/test_table_locks.py"),
    Mutant("a round does not see its own writes", tables.round_not_seen,
           weather=TABLED | {"linger": 0.8}, suite="tests/core/test_table_locks.py"),
    Mutant("a row's number outlives a write", tables.numbers_outlive_writes, weather=COUNTED,
           suite="tests/core/test_row_changes.py"),
    Mutant("a row's number outlives a failed round", tables.numbers_outlive_rounds,
           weather=COUNTED_IN_TROUBLE, suite="tests/core/test_row_changes.py"),
    Mutant("a change takes a row from before the reach", tables.bases_below_the_reach,
           weather=COUNTED | {"director_s": 2.0}, suite="tests/core/test_row_changes.py"),
    *(Mutant(name, plant, weather=DERIVING, suite=DERIVED, by_clients=by_clients, quick=quick, seed=seed)
      for name, plant, by_clients, quick, seed in (
        ("writers need not run a source's functions", derived.any_writer, False, False, 0),
        ("a derivation comes into force at once", derived.in_force_at_once, False, False, 0),
        ("the row before is not locked", derived.unlocked, True, False, 0),
        ("a unique value is not locked", derived.unlocked_entries, True, False, 0),
        ("a unique value is not looked for", derived.values_occur_twice, True, False, 0),
        ("a look-up does not lock its version", derived.ready_without_a_lock, True, False, 0),
        ("a source takes additions", derived.changes_are_taken, False, False, 0),
        ("a build does not lock rows", derived.builds_without_locks, True, False, 0),
        ("another row's entry is deleted", derived.all_entries_go, True, False, 0))),
    Mutant("a version is set instead of taken away", derived.a_version_is_set, weather=SLEEPING, suite=DERIVED),
    *(Mutant(name, plant, weather=DERIVING, by_clients=by_clients, quick=quick, seed=seed)
      for name, plant, by_clients, quick, seed in (
        ("writers of a source's rows run what they want", derived.any_writer_of_rows, False, False, 0),
        ("a version that ended is written", derived.any_version, False, False, 0),
        ("plain writes to a source are taken", derived.plain_writes_are_taken, False, False, 0),
        ("a switch retires no version", derived.nothing_is_retired, True, False, 0),
        ("a version is ready before it is built", derived.ready_at_once, True, False, 0))),
    *(Mutant(name, plant, weather=DERIVING, suite=TOTALS, by_clients=True, quick=quick, seed=seed)
      for name, plant, quick, seed in (
        ("a total is not locked", derived.unlocked_totals, False, 0),
        ("a writer does not lock the state of totals", derived.states_unlocked, False, 0),
        ("a writer does not lock a build's progress", derived.progress_unlocked, False, 0),
        ("a row is taken from totals that lack it", derived.always_added, False, 0),
        ("a row under way counts as one in the totals", derived.sent_counts, False, 0),
        ("a build adds rows that writers added", derived.added_twice, False, 0),
        ("a build begins with totals", derived.begins_with_rows, False, 0),
        ("the total of an empty group stays", derived.empty_groups_stay, False, 0))),
    Mutant("one worker's progress counts for all", asynchronous.any_task_counts, weather=LATER,
           by_clients=True, suite=ASYNCHRONOUS),
    Mutant("input that is left counts as derived", asynchronous.left_counts, simulated=False,
           by_clients=True, suite=ASYNCHRONOUS),
    Mutant("entries have their workers' times", asynchronous.own_times, weather=LATER,
           by_clients=True, suite=ASYNCHRONOUS),
    Mutant("a derived table's source is not asked for", asynchronous.source_is_not_asked, weather=LATER,
           by_clients=True, suite=ASYNCHRONOUS),
    Mutant("a table is derived twice", asynchronous.derived_twice, simulated=False, suite=ASYNCHRONOUS),
    Mutant("a table with rows gets a new processor", asynchronous.over_old_rows, simulated=False,
           by_clients=True, suite=ASYNCHRONOUS),
    Mutant("a worker does not know the row before", asynchronous.row_before_is_unknown, weather=LATER,
           by_clients=True, suite=ASYNCHRONOUS),
    Mutant("a table is derived from a base that came later", asynchronous.any_base, simulated=False,
           by_clients=True, suite=ASYNCHRONOUS),
    Mutant("a task has its position before all of a base", asynchronous.positions_at_once, simulated=False,
           by_clients=True, suite=ASYNCHRONOUS),
    Mutant("a derived table is read before its base", asynchronous.before_the_base, simulated=False,
           by_clients=True, suite=ASYNCHRONOUS),
    Mutant("changes that are given up are not resolved", tables.given_up_unresolved, simulated=False,
           by_clients=True, suite="tests/tables/test_row_changes.py"),
    Mutant("a commit that was advised is given up", tables.advised_and_given_up, simulated=False,
           by_clients=True, suite="tests/tables/test_row_turns.py"),
    Mutant("journals write nothing, for locks", tables.journals_unknown, weather=TABLED),
    Mutant("a digest lacks a key", tables.digests_lack, weather=TABLED, seed=1),
    Mutant("one-shots break no locks", tables.one_shots_unnoticed, weather=TABLED,
           suite=IN_MEMORY),
    Mutant("plain writes break no locks", tables.plain_writes_unnoticed, weather=TABLED,
           suite=IN_MEMORY),
    Mutant("rolling commits break no locks", tables.rolling_unnoticed, weather=TABLED,
           suite=IN_MEMORY),
    Mutant("moved runs break no locks", tables.moved_runs_unnoticed, simulated=False,
           suite=IN_MEMORY),
    Mutant("what is not sure is broken", tables.unsure_is_broken, weather=TABLED,
           by_clients=True, suite=IN_MEMORY),
    Mutant("a commit in doubt is broken by itself", tables.broken_in_doubt, simulated=False,
           by_clients=True, suite=IN_MEMORY),
    Mutant("a repeated one-shot is judged again", tables.judged_again, simulated=False,
           suite="tests/core/test_table_locks.py"),
    Mutant("own writes break own locks", tables.broken_by_itself, simulated=False,
           suite="tests/core/test_table_locks.py"),
    Mutant("a lock is broken by what was read", tables.broken_by_what_it_read, weather=TABLED,
           by_clients=True),
    Mutant("completeness by the broker's word", tables.complete_by_the_broker, simulated=False,
           by_clients=True, suite="tests/tables/test_replica.py"),
    Mutant("a lock is validated by another table", tables.complete_by_another, weather=TABLED,
           by_clients=True),
    Mutant("a replica is complete by another table's time", tables.seen_by_another,
           weather=TABLED, by_clients=True, suite="tests/tables/test_replica.py"),
    Mutant("a deletion is swept early", tables.deletion_swept_early, weather=TABLED,
           by_clients=True, suite="tests/tables/test_store.py"),
    Mutant("marks are taken after the look", tables.marks_after_the_look, weather=TABLED,
           by_clients=True, suite=IN_MEMORY),
    Mutant("versions are swept early", tables.swept_early, weather=TABLED, by_clients=True),
    Mutant("a replica's position passes rows", tables.position_first, weather=TABLED,
           by_clients=True),
    Mutant("registered locks never break", tables.registered_never_broken, weather=TABLED),
    Mutant("locks of a transaction are not counted", tables.locks_uncounted, quick=True,
           weather=GREEDY),
    Mutant("a snapshot may have any age", tables.old_snapshots, weather=GREEDY),
    Mutant("a registered lock's break is not logged", tables.broken_not_logged, simulated=False,
           suite="tests/core/test_registered_locks.py"),
    Mutant("own writes break registered locks", tables.registered_breaks_itself, weather=TABLED),
    Mutant("a doubt makes no look due", tables.doubts_dropped, simulated=False,
           suite="tests/core/test_registered_locks.py"),
    Mutant("a doubt breaks registered locks", tables.what_is_not_sure_breaks, simulated=False,
           suite="tests/core/test_registered_locks.py"),
    Mutant("locks that nobody validated are committed", tables.sets_not_validated,
           simulated=False, suite="tests/core/test_registered_locks.py"),
    Mutant("a process reports locks that it did not validate", tables.told_before_the_look, weather=TABLED,
           by_clients=True),
    Mutant("locks of one writer alone are kept", tables.left_out_forgotten, weather=TABLED),
    Mutant("a commit leaves out who was read from", tables.read_from_left_out, simulated=False,
           suite="tests/core/test_registered_locks.py"),
    Mutant("an unfinished writer is read", tables.unfinished_read, simulated=False,
           by_clients=True, suite="tests/tables/test_read_back.py"),
    Mutant("a finished writer is not read", tables.finished_missed, simulated=False,
           by_clients=True, suite="tests/tables/test_read_back.py"),
    Mutant("of a carried commit a key is not known", tables.carried_digest_lacks,
           weather=FREEZING),
    Mutant("locks of big transactions are not frozen", tables.no_freezing, weather=FREEZING),
    Mutant("freezing looks at one side", tables.frozen_one_sided, simulated=False,
           suite="tests/core/test_frozen_locks.py"),
    Mutant("a base is of now", tables.base_of_now, weather=TABLED,
           suite="tests/tables/test_base.py"),
    Mutant("more is deleted than a base covers", tables.deleted_beyond_the_base, weather=TABLED,
           suite="tests/tables/test_base.py"),
    Mutant("what a base covers is deleted first", tables.deleted_before_published, simulated=False,
           suite="tests/controller/test_bases.py"),
    Mutant("a base is laid over rows", tables.base_laid_over_rows, weather=TABLED, by_clients=True,
           suite="tests/tables/test_base.py"),
    Mutant("a base's rows are the compactor's", tables.rows_of_the_compactor, simulated=False,
           by_clients=True, suite="tests/tables/test_base.py"),
    Mutant("any transaction is a base", tables.any_base, simulated=False,
           suite="tests/core/test_refusals_of_tables.py"),
    # -- bytes
    Mutant("a run begins an offset late", batches.late_first_offset, simulated=False,
           suite="tests/batches/test_framing.py"),
    Mutant("one writer's run stands for a whole batch", batches.first_writer_for_all,
           weather={"mixed_batches": True, "small": True}, suite="tests/batches/test_framing.py"),
    Mutant("a spliced batch keeps its CRC", batches.crc_left, suite="tests/batches/test_format.py"),
    Mutant("the raw reader shows what was aborted", batches.aborted_read, simulated=False,
           play=plays.one_aborts_and_commits_later),
    Mutant("the raw reader passes over abort markers", batches.marker_passed, simulated=False,
           play=plays.one_aborts_and_commits_later),
    Mutant("columns are read beyond a range's end", batches.beyond_the_range, simulated=False,
           suite="tests/batches/test_columns_read.py"),
    Mutant("input that a commit has no room for is dropped", tasks.left_input_is_dropped, simulated=False,
           by_clients=True, suite="tests/testing/test_programs.py"),
    Mutant("an input commit is handled whole, however long it takes", tasks.commits_of_any_length,
           simulated=False, by_clients=True, suite="tests/processing/test_in_time.py"),
    Mutant("a part's rest begins with its commit", tasks.rest_from_the_beginning, simulated=False,
           by_clients=True, suite="tests/processing/test_in_time.py"),
    Mutant("a task moves to another thread before its last commit has ended", tasks.claims_of_no_thread,
           simulated=False, by_clients=True, suite="tests/processing/test_threads.py"),
    Mutant("a driver forgets input that a commit has no room for", tasks.a_driver_forgets_left_input,
           simulated=False, by_clients=True, suite="tests/testing/test_driver.py"),
    Mutant("a level is used before it is raised", decisions.levels_are_not_checked, simulated=False,
           suite="tests/controller/test_levels.py"),
    Mutant("any feature level is set", decisions.any_level_is_set, simulated=False,
           suite="tests/core/test_features.py"),
    Mutant("new control partitions have no lanes", decisions.grown_without_rights, quick=True, weather=GROWING),
    Mutant("new control partitions are used too early", decisions.used_too_early, simulated=False,
           suite="tests/core/test_streams.py"),
    Mutant("a commit is answered before its decision", decisions.answered_too_early, simulated=False,
           suite="tests/core/test_merge.py"),
    Mutant("rows above the feature level are read", decisions.rows_of_any_level, simulated=False,
           suite="tests/core/test_features.py"),
)  # fmt: skip


def named(name: str) -> Mutant:
    """The mutant of that name; `KeyError` if there is none."""
    return {mutant.name: mutant for mutant in CATALOGUE}[name]


def planted(name: str) -> AbstractContextManager[object]:
    """The bug of that name in this process; nothing where the name is empty: for forked children's specs."""
    return named(name).plant() if name else nullcontext()
