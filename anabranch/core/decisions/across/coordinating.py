"""The coordinator's side of a transaction over several control partitions (`docs/inside/across.md`, sections 4, 5).

The coordinator is the control partition in the transaction's id. Its rows say which others take part
(`PartitionRow`), and the round of votes that counts (`VotesRow`). Votes themselves are in memory (`Across.votes`),
as a successor asks again. `core.across.coordinator` has the rules. Three callers use this file:

- `receiving` brings the messages of participants: `on_enlist`, `on_vote`, `on_done`.
- `deciding` takes the steps of a commit, with the functions of *a pending commit*: `begin_round` raises the round
  of votes, `next_step` looks at the votes, `carry_out` and `choose_timestamp` do what follows.
- `receiving.advance` calls `advance` once in each turn: it sends what the rows say (M1), again while no answer
  comes, and ends what is over everywhere (O2).

A refused vote, a deadline or an operator may end a pending commit. This only deletes the row of the commit:
`advance` then raises the round of votes, so that the participants reopen (C5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from anabranch import errors
from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.across import coordinator
from anabranch.core.across.coordinator import HELD_MS, Step
from anabranch.core.across.messages import raised
from anabranch.core.decisions.prepared import shot_of
from anabranch.core.decisions.transactions import abort_txn, end_pending, finish
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.decisions.writers import receipts_of
from anabranch.core.memory import NEVER_MS, Across, Quiet, Sent, lately_ms
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.errors import InvariantViolation, check
from anabranch.protocol import limits
from anabranch.protocol.ids import TXN_ID_SIZE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Rights, peek

# A message without an answer is sent again after `PAUSE_TIMES` the time that answers take, within these limits;
# then after twice the time before. Under load answers take long, and copies would add to it.
PAUSE_TIMES = 2
FIRST_PAUSE_MS = 250
MOST_FIRST_MS = 1_000
LONGEST_PAUSE_MS = 5_000
# Messages `Done` are logged with the next round, after this time at the latest. No client waits for that.
DONE_MS = 20
# A vote may ask for a new round of votes. The coordinator begins it after this time; each time after twice the time
# before, as what the vote meets may last.
AGAIN_MS = 20
MOST_DOUBLED = 5
# A commit with parts at other control partitions has this in its row, in the place of a program's `Prepare`. Once
# it is decided, nothing takes it back.
ELSEWHERE = r.Prepare(b"", b"")
# The messages that are sent to a participant again until it has answered; "commit_later": without a timestamp.
_KINDS = ("ask", "commit", "commit_later", "abort")
ENDING = ("FINALIZE_IN_PROGRESS", "ABORT_IN_PROGRESS")
_SKEW = errors.ClockSkew.__name__
_FOR_GOOD = ("StreamLost", "TransactionAborted")  # refusals that no later commit can mend


# -- messages to the coordinator ---------------------------------------------------------------------------


def on_enlist(turn: Turn, message: r.Enlist) -> None:
    """Answer whether a transaction may have streams of another control partition, and log this participant (O1)."""
    row: r.TxnRow | None = None
    try:
        row = _check_enlist(turn, message)
    except errors.AnabranchError as error:
        answer = r.Enlisted(message.txn_id, message.scope, refusal=refuse(error))
        turn.send(message.partition, answer, None)
        return
    known = turn.state.partition_rows(message.txn_id).get(message.partition, r.PartitionRow(()))
    if message.scope not in known.scopes:
        scopes = (*known.scopes, message.scope)
        key = k.partition_key(message.txn_id, message.partition)
        turn.put(key, known._replace(scopes=scopes))
    turn.hear(row.txn_id)
    turn.send(
        message.partition, r.Enlisted(message.txn_id, message.scope, head_of(row)), row.secret
    )


def _check_enlist(turn: Turn, message: r.Enlist) -> r.TxnRow:
    """The transaction's row, if the token that the client gave permits writing, and a participant may be added."""
    if len(message.token) == TXN_ID_SIZE:
        raise errors.InvalidToken("a bare id proves nothing to another control partition")
    if peek(message.token).txn_id != message.txn_id:
        raise errors.InvalidToken("the token is of another transaction than the message")
    turn.lane = message.lane
    row = turn.transaction(message.token, Rights.WRITE)
    TRANSACTIONS.judge(row.state, "touch", row.reason)
    txn = turn.open(row.txn_id)
    if not coordinator.may_enlist(row, txn.pending):
        raise errors.NotReady("a commit of the transaction waits: it can't have more streams now")
    if message.partition not in txn.partitions:
        limits.PARTICIPANTS.check(len(txn.partitions) + 1, "a transaction")
    return row


def head_of(row: r.TxnRow) -> r.TxnHead:
    """The description of a transaction for its participants."""
    if row.secret is None:
        raise InvariantViolation("a transaction without a secret has a participant")
    return r.TxnHead(row.scope, row.owner, row.keepalive_ms, row.begun_ms, row.secret, row.snapshot)


def on_vote(turn: Turn, vote: r.Vote, seen: int) -> None:
    """Keep a vote if it counts (C1). ``seen``: the participant's time. If it is too far ahead, a yes is a no (T1).

    After the decision a vote can't be no any more, so it is asked for again later. A no for good aborts a
    transaction that is open without a commit, in whatever round of votes it was given.
    """
    txn, shot = turn.state.open.get(vote.txn_id), turn.across.asked_shots.get(vote.txn_id, None)
    if txn is None:
        # Nothing of a one-shot is logged while its first votes are asked for.
        if shot is None or vote.votes_round != 1 or vote.partition not in shot.command.places:
            return
    elif txn.row.state == "OPEN" and txn.pending is None and _is_for_good(vote):
        abort_txn(turn, vote.txn_id, vote.error.message if vote.error else "")
        return
    elif not coordinator.counts(txn.votes_row, vote) or vote.partition not in txn.partitions:
        return
    elif txn.row.state not in ("OPEN", "FINALIZE_IN_PROGRESS") or txn.row.commit_timestamp:
        return  # a late copy: it is decided, or its program decides
    try:
        if vote.answer == "YES":
            time, most_ms = max(vote.timestamp, seen), turn.settings.max_clock_skew_ms
            turn.hybrid_time = raised(turn.hybrid_time, time, turn.now_us, most_ms)
    except errors.ClockSkew as error:
        vote = vote._replace(answer="NO", timestamp=0, error=refuse(error))
    if txn is not None and txn.lacks_time and vote.error is not None and vote.error.code == _SKEW:
        vote = vote._replace(answer="AGAIN")
    key = vote.txn_id, vote.partition
    if turn.across.votes.get(key, None) is None:
        _note_answer(turn, (*key, "ask"))
    turn.across.votes.put(key, vote)
    turn.across.quiet.put(vote.txn_id, None)
    is_new = turn.across.held_ms.get(vote.txn_id, None) is None
    if vote.timestamp and (txn is None or has_asked(txn)) and is_new:
        turn.across.held_ms.put(vote.txn_id, turn.now_ms)


def _is_for_good(vote: r.Vote) -> bool:
    """Whether the participant can never commit the transaction."""
    return vote.answer == "NO" and vote.error is not None and vote.error.code in _FOR_GOOD


def _note_answer(turn: Turn, key: tuple[bytes, int, str]) -> None:
    """Note how long the first answer to a message took."""
    sent, across = turn.across.sent.get(key, None), turn.across
    if sent is not None:
        across.answer_ms = lately_ms(across.answer_ms, turn.now_ms - sent.since_ms)


def first_pause_ms(across: Across) -> int:
    """When a message that is sent now is sent again, unless it is answered before."""
    return min(max(PAUSE_TIMES * across.answer_ms, FIRST_PAUSE_MS), MOST_FIRST_MS)


def on_done(turn: Turn, message: r.Done) -> None:
    """Note that a participant has carried out the decision. `log_done` logs it: at once, or within `DONE_MS`.

    A one-shot is answered as soon as all participants have carried it out, before that is logged here: the decision
    and all merges are logged, so no failure changes the answer. The answer to a commit through journals waits for
    the log, as it counts the records that were rejected until then.
    """
    txn = turn.state.open.get(message.txn_id)
    row = None if txn is None else txn.partitions.get(message.partition)
    if txn is None or row is None or row.done or txn.row.state not in ENDING:
        return
    across, txn_id = turn.across, message.txn_id
    if across.done.get((txn_id, message.partition), None) is None:
        _note_answer(turn, (txn_id, message.partition, "commit"))
    across.done.put((txn_id, message.partition), message)
    across.done_ms = min(across.done_ms, turn.now_ms + DONE_MS)
    if txn.row.state == "ABORT_IN_PROGRESS":
        return
    # A participant that is done before the timestamp was ended by an operator: the next question depends on that.
    # The participants of a one-shot were not enlisted, and have no scopes.
    is_shot = not any(participant.scopes for participant in txn.partitions.values())
    if txn.lacks_time or not is_shot:
        log_done(turn)
    elif txn.pending is not None and across.answered.get(txn_id, None) is None:
        _answer_early(turn, txn, txn.pending)


def _answer_early(turn: Turn, txn: OpenTxn, pending: r.PendingCommitRow) -> None:
    """Answer a committed one-shot if all participants are done, though that is not logged yet."""
    across, txn_id, after = turn.across, txn.row.txn_id, dict[int, r.PartitionRow]()
    for partition, participant in txn.partitions.items():
        message = across.done.get((txn_id, partition), None)
        after[partition] = (
            participant if message is None else _row_when_done(txn.row, participant, message)
        )
    if not coordinator.is_over(txn.row, _votes_row(txn), after):
        return
    ended = _committed(turn, txn.row, after.values())
    askers = tuple(map(ReplyTo.of, pending.askers))
    across.answered.put(txn_id, askers)
    for to in askers:
        turn.tell(to, ended)


def _row_when_done(row: r.TxnRow, participant: r.PartitionRow, message: r.Done) -> r.PartitionRow:
    """The row of a participant that has carried out the decision."""
    after = participant._replace(done=True)
    if message.committed or message.left_out or row.state == "ABORT_IN_PROGRESS":
        after = after._replace(committed=message.committed, left_out=message.left_out)
    elif message.reason:  # an operator aborted its part
        after = after._replace(committed=0, left_out=participant.committed + participant.left_out)
    # Otherwise its row there is purged: the counts of its vote are right.
    return after._replace(rejected=message.rejected, reason=message.reason)


def log_done(turn: Turn) -> None:
    """Log what participants have carried out, and end what is over everywhere."""
    across = turn.across
    for (txn_id, partition), message in sorted(across.done.as_dict().items()):
        across.done.put((txn_id, partition), None)
        txn = turn.state.open.get(txn_id)
        if txn is None or partition not in txn.partitions:
            continue
        since = turn.work
        participant = txn.partitions[partition]
        after = _row_when_done(txn.row, participant, message)
        parts = {**txn.partitions, partition: after}
        is_over = coordinator.is_over(txn.row, _votes_row(txn), parts)
        if not is_over or after._replace(done=participant.done) != participant:
            turn.put(k.partition_key(txn_id, partition), after)
        if is_over:
            _end(turn, txn, parts)
        turn.owe(txn.row.owner, since)
    across.done_ms = NEVER_MS


# -- a pending commit ----------------------------------------------------------------------------------------


def has_asked(txn: OpenTxn) -> bool:
    """Whether the participants have been asked for votes, and these are not taken back."""
    return txn.votes_row is not None and txn.votes_row.asks != "REOPEN"


def may_ask(turn: Turn, txn: OpenTxn) -> bool:
    """Whether participants that gave way have had some time, and all have reopened.

    A participant that is still prepared would vote for the writers of the former commit (C6). The events of a
    one-shot are always the same.
    """
    txn_id = txn.row.txn_id
    if turn.now_ms < turn.across.again_ms.get(txn_id, 0):
        return False
    is_first = txn.votes_row is None or shot_of(turn.state, txn_id) is not None
    return is_first or votes_of(turn, txn_id).keys() == txn.partitions.keys()


def begin_round(turn: Turn, txn_id: bytes, asks: r.Asks) -> None:
    """Log the next round of votes, in which former votes don't count (C1). `advance` sends the questions.

    ``asks``: "VOTE", "TIMESTAMP" (a vote with one), or "REOPEN" (take the vote back).
    """
    txn = turn.open(txn_id)
    former = txn.votes_row
    turn.put(k.votes_key(txn_id), coordinator.raise_round(former, asks))
    if former is not None:  # a one-shot's first votes are asked for before, and may be here already
        _forget_votes(turn.across, txn_id, txn.partitions)


def _forget_votes(across: Across, txn_id: bytes, partitions: Iterable[int]) -> None:
    for partition in partitions:
        across.votes.put((txn_id, partition), None)
    across.held_ms.put(txn_id, None)


def votes_of(turn: Turn, txn_id: bytes) -> dict[int, r.Vote]:
    """The votes that count, by participant."""
    found = {
        partition: turn.across.votes.get((txn_id, partition), None)
        for partition in turn.open(txn_id).partitions
    }
    return {partition: vote for partition, vote in found.items() if vote is not None}


def next_step(turn: Turn, txn: OpenTxn, *, own_stages: bool) -> Step:
    """The next step of a commit whose participants are asked. ``own_stages``: as in `coordinator.next_step`."""
    txn_id = txn.row.txn_id
    if txn.votes_row is None:
        raise InvariantViolation("a commit has no round of votes")
    held_ms = turn.across.held_ms.get(txn_id, turn.now_ms)
    # An operator may have ended the part of a participant, whatever its vote is.
    partitions = {partition: row for partition, row in txn.partitions.items() if not row.done}
    votes = votes_of(turn, txn_id)
    return coordinator.next_step(
        txn.votes_row.asks,
        partitions,
        {partition: vote for partition, vote in votes.items() if partition in partitions},
        late=False,  # the caller refuses a commit whose deadline has passed
        held_ms=turn.now_ms - held_ms,
        decided=txn.lacks_time,
        own_stages=own_stages,
        prepares=txn.pending is not None and txn.pending.prepare is not None,
    )


def only_waits(turn: Turn, txn: OpenTxn) -> bool:
    """Whether a participant owes an answer, and nothing has changed since the last turn: no step can follow."""
    txn_id = txn.row.txn_id
    quiet = turn.across.quiet.get(txn_id, None)
    return (
        quiet is not None
        and turn.now_ms < quiet.until_ms < NEVER_MS
        and turn.across.held_ms.get(txn_id, None) is None
        and quiet.rows == _rows_of(txn)
    )


def end_long_hold(turn: Turn, txn_id: bytes) -> None:
    """Ask for votes without timestamps, if votes with timestamps have held streams for `HELD_MS`."""
    held_ms = turn.across.held_ms.get(txn_id, turn.now_ms)
    if turn.now_ms - held_ms >= HELD_MS:
        begin_round(turn, txn_id, "VOTE")


def carry_out(turn: Turn, txn_id: bytes, step: Step) -> None:
    """Carry out a step that decides nothing."""
    txn = turn.open(txn_id)
    if step is Step.TIMESTAMPS and txn.votes_row is not None:
        turn.put(k.votes_key(txn_id), coordinator.with_timestamps(txn.votes_row))
    elif step is Step.TAKE_BACK:
        begin_round(turn, txn_id, "VOTE")
    elif step is Step.AGAIN:
        _ask_again(turn, txn)
    elif step is Step.REFUSE:
        _refuse(turn, txn_id)
    else:
        check(step is Step.WAIT, f"{step} decides something")


def _ask_again(turn: Turn, txn: OpenTxn) -> None:
    """Let participants give back what they have promised, and ask again after a pause that grows."""
    txn_id, before_ms = txn.row.txn_id, turn.across.again_ms.get(txn.row.txn_id, 0)
    if txn.lacks_time and turn.now_ms < before_ms:
        return
    # Each time raises the round of votes by two: to reopen, and to ask again.
    times = 0 if txn.votes_row is None else txn.votes_row.votes_round // 2
    pause_ms = AGAIN_MS << min(times, MOST_DOUBLED)
    turn.across.again_ms.put(txn_id, turn.now_ms + pause_ms)
    begin_round(turn, txn_id, "VOTE" if txn.lacks_time else "REOPEN")


def _refuse(turn: Turn, txn_id: bytes) -> None:
    """Answer a commit with the refusal of a participant. The transaction stays open (C5).

    If it can never commit, because the participant has lost a stream of it, it is aborted (C4).
    """
    no = next(vote for vote in votes_of(turn, txn_id).values() if vote.answer == "NO")
    found = r.Refusal("NotReady", f"control partition {no.partition} can't commit it now")
    for to in end_pending(turn, txn_id, None):
        turn.reply(to, no.revalidate or no.error or found)
    if no.error is not None and (_is_for_good(no) or shot_of(turn.state, txn_id) is not None):
        abort_txn(turn, txn_id, no.error.message)
    else:
        turn.hear(txn_id)


def missing_text(turn: Turn, txn: OpenTxn) -> str:
    """Which participants have not voted, for people; empty if all have."""
    votes, asks = votes_of(turn, txn.row.txn_id), has_asked(txn)
    lacking = [
        partition
        for partition in sorted(txn.partitions)
        if partition not in votes or (asks and votes[partition].answer != "YES")
    ]
    if not lacking and not asks:  # all have reopened
        lacking = sorted(txn.partitions)
    if not lacking:
        return ""
    text = f"the vote of control partition {', '.join(map(str, lacking))} did not come before the deadline"
    wait = waits_for(turn, txn)
    return text if wait is None else f"{text}: the commit {wait.text}"


def waits_for(turn: Turn, txn: OpenTxn) -> r.WaitInfo | None:
    """The participants that have not answered, and for how long; None: no message is under way."""
    txn_id, votes, texts = txn.row.txn_id, votes_of(turn, txn.row.txn_id), list[str]()
    longest_ms = -1
    for partition in sorted(txn.partitions):
        age_ms = waited_ms(turn, txn_id, partition)
        if age_ms < 0:
            continue
        longest_ms = max(longest_ms, age_ms)
        asks = turn.across.sent.get((txn_id, partition, "ask"), None) is not None
        text = f"for {'the vote' if asks else 'the end'} of control partition {partition}"
        if partition in votes:
            error = votes[partition].error
            why = "" if error is None else f": {error.message}"
            text += f", which answered that its vote has to wait{why}"
        elif age_ms >= MOST_FIRST_MS:
            text += ", whose leader does not answer"
        texts.append(text)
    if not texts:
        return None
    text = limits.cut(f"waits {longest_ms / 1000:.1f} s {'; '.join(texts)}")
    return r.WaitInfo("participants", "", text, longest_ms)


def waited_ms(turn: Turn, txn_id: bytes, partition: int) -> int:
    """For how long a participant owes an answer; -1: it owes none."""
    ages = [
        turn.now_ms - sent.since_ms
        for kind in _KINDS
        if (sent := turn.across.sent.get((txn_id, partition, kind), None)) is not None
    ]
    return max(ages, default=-1)


def part_infos(turn: Turn, row: r.TxnRow) -> tuple[r.PartInfo, ...]:
    """The parts of a transaction on other control partitions, as its coordinator knows them.

    Their rows are kept as long as the transaction's.
    """
    if row.txn_id not in turn.state.open:
        rows = sorted(turn.state.partition_rows(row.txn_id).items())
        turn.charge(work.of_items(len(rows)))
        # An operator may have committed a part of an aborted transaction by force.
        states: list[r.TxnState] = [
            "COMMITTED" if participant.committed else row.state for _, participant in rows
        ]
        return tuple(
            r.PartInfo(number, participant.scopes, state, 0, None, -1)
            for (number, participant), state in zip(rows, states, strict=True)
        )
    txn, votes = turn.open(row.txn_id), votes_of(turn, row.txn_id)
    votes_round = 0 if txn.votes_row is None else txn.votes_row.votes_round
    found = []
    for number, participant in sorted(txn.partitions.items()):
        vote = votes.get(number)
        state: r.TxnState = "OPEN" if vote is None or vote.answer != "YES" else "PREPARED"
        if row.state in ENDING:
            ended: r.TxnState = "COMMITTED" if row.state[0] == "F" else "ABORTED"
            state = ended if participant.done else row.state
        waited = waited_ms(turn, row.txn_id, number)
        answer = None if vote is None else vote.answer
        found.append(r.PartInfo(number, participant.scopes, state, votes_round, answer, waited))
    return tuple(found)


def log_counts(turn: Turn, txn_id: bytes) -> None:
    """Log how many events the participants will commit, by their votes."""
    votes = votes_of(turn, txn_id)
    for partition, row in turn.open(txn_id).partitions.items():
        vote = votes.get(partition)  # None: it is done already
        after = vote and row._replace(committed=vote.committed, left_out=vote.left_out)
        if after not in (None, row):
            turn.put(k.partition_key(txn_id, partition), after)


def choose_timestamp(turn: Turn, txn_id: bytes) -> int:
    """The commit timestamp, for which all participants have voted (C2). The votes are forgotten."""
    votes = votes_of(turn, txn_id)
    at = timestamp_of(turn, votes)
    _forget_votes(turn.across, txn_id, votes)
    return at


def timestamp_of(turn: Turn, votes: coordinator.Votes) -> int:
    """The commit timestamp by these votes. This is later than each of theirs, so no other commit has it (H8)."""
    turn.hybrid_time = max([turn.hybrid_time, *[vote.timestamp for vote in votes.values()]])
    return coordinator.commit_timestamp(votes, turn.next_timestamp())


def forget_messages(turn: Turn, txn_id: bytes) -> None:
    """Drop the votes of a transaction, and the messages that are repeated until they are answered."""
    partitions = turn.open(txn_id).partitions
    _forget_sent(turn.across, txn_id, partitions)
    _forget_votes(turn.across, txn_id, partitions)


def forget_questions(turn: Turn, txn_id: bytes, partitions: Collection[int]) -> None:
    """Drop the first questions for votes, and the votes, of a one-shot that is not logged yet."""
    for partition in partitions:
        turn.across.sent.put((txn_id, partition, "ask"), None)
    _forget_votes(turn.across, txn_id, partitions)


# -- in each turn --------------------------------------------------------------------------------------------


def advance(turn: Turn) -> None:
    """Take back promises for commits that ended, end what is over everywhere, and send messages that are due."""
    across = turn.across
    if across.done_ms != NEVER_MS and (turn.now_ms >= across.done_ms or not turn.round.empty):
        log_done(turn)
    for txn_id in sorted(turn.state.asking):
        txn, since = turn.open(txn_id), turn.work
        quiet = across.quiet.get(txn_id, None)
        if quiet is not None and turn.now_ms < quiet.until_ms and quiet.rows == _rows_of(txn):
            continue  # there may be thousands, while a participant is away
        if txn.row.state == "OPEN" and txn.pending is None and shot_of(turn.state, txn_id):
            refused = "its commit was refused, and a one-shot does not stay open"
            abort_txn(turn, txn_id, missing_text(turn, txn) or refused)
        elif txn.row.state == "OPEN" and txn.pending is None and has_asked(txn):
            across.exactly.put(txn_id, None)
            begin_round(turn, txn_id, "REOPEN")
        over = coordinator.is_over(txn.row, _votes_row(txn), txn.partitions)
        if over and txn.row.state in ENDING:
            _end(turn, txn, txn.partitions)
        else:
            until_ms = _send_due(turn, txn_id, txn)
            across.quiet.put(txn_id, Quiet(_rows_of(txn), until_ms))
        turn.owe(txn.row.owner, since)


def _rows_of(txn: OpenTxn) -> tuple[object, ...]:
    """The rows that say which messages are due. A changed row is another object."""
    return (txn.row, txn.votes_row, txn.pending, *txn.partitions.values())


def _end(turn: Turn, txn: OpenTxn, parts: Mapping[int, r.PartitionRow]) -> None:
    """Log COMMITTED or ABORTED, as all participants are done. Answer those who have no answer yet.

    ``parts``: the rows of the participants. The last one is perhaps not logged, as no decision needs it any more.
    """
    row = txn.row
    answered = turn.across.answered.get(row.txn_id, ())
    forget_messages(turn, row.txn_id)
    turn.across.answered.put(row.txn_id, None)
    turn.across.again_ms.put(row.txn_id, None)
    turn.across.quiet.put(row.txn_id, None)
    turn.across.exactly.put(row.txn_id, None)
    if row.state == "ABORT_IN_PROGRESS":
        apart = [
            str(partition) for partition, participant in parts.items() if participant.committed
        ]
        if apart:
            there = ", ".join(apart)
            said = f"{row.reason}; committed at control partition {there} alone, by force"
            row = row._replace(reason=limits.cut(said))
        finish(turn, turn.move(row, "finalize_abort"))
        return
    row = _committed(turn, row, parts.values())
    waiting = end_pending(turn, row.txn_id, None)
    finish(turn, row)
    for to in waiting:
        if to not in answered:
            turn.answer(to, row)


def _committed(turn: Turn, row: r.TxnRow, elsewhere: Iterable[r.PartitionRow]) -> r.TxnRow:
    """The row of a transaction that is merged everywhere."""
    parts = [*elsewhere]
    reasons = [row.reason, *[participant.reason for participant in parts]]
    return turn.move(
        row,
        "finalize_commit",
        finished_ms=turn.wall_ms,
        committed=row.committed + sum([participant.committed for participant in parts]),
        left_out=row.left_out + sum([participant.left_out for participant in parts]),
        rejected=turn.rejected(row) + sum([participant.rejected for participant in parts]),
        reason=limits.cut("; ".join(filter(None, reasons))),
    )


def _votes_row(txn: OpenTxn) -> r.VotesRow:
    """The round of votes; if none has begun, one without promises."""
    return txn.votes_row or r.VotesRow(0, "REOPEN")


def _send_due(turn: Turn, txn_id: bytes, txn: OpenTxn) -> int:
    """Send what the participants have not answered: at once, then again after pauses that grow.

    Returns when something is to be sent again, if neither rows nor votes change before.
    """
    sent, due, until_ms = turn.across.sent, set(), NEVER_MS
    for message in coordinator.due(txn.row, txn.votes_row, txn.partitions, votes_of(turn, txn_id)):
        key = txn_id, message.partition, message.what
        due.add(key)
        last = sent.get(key, None)
        asks = (0, "") if txn.votes_row is None else (txn.votes_row.votes_round, txn.votes_row.asks)
        if last is None or last.asks != asks:
            pause_ms = first_pause_ms(turn.across)
            next_ = Sent(asks, turn.now_ms, turn.now_ms + pause_ms, pause_ms)
        elif turn.now_ms >= last.next_ms:
            pause_ms = min(2 * last.pause_ms, LONGEST_PAUSE_MS)
            next_ = Sent(asks, last.since_ms, turn.now_ms + pause_ms, pause_ms)
        else:
            until_ms = min(until_ms, last.next_ms)
            continue
        sent.put(key, next_)
        until_ms = min(until_ms, next_.next_ms)
        turn.send(message.partition, _message(turn, txn, message), txn.row.secret)
    _forget_sent(turn.across, txn_id, txn.partitions, due)
    return until_ms


def _forget_sent(
    across: Across,
    txn_id: bytes,
    partitions: Iterable[int],
    due: Collection[tuple[bytes, int, str]] = (),
) -> None:
    """Send these participants no message again, except those that are ``due``."""
    for partition in partitions:
        for kind in _KINDS:
            key = txn_id, partition, kind
            if key not in due and across.sent.get(key, None) is not None:
                across.sent.put(key, None)


def _message(turn: Turn, txn: OpenTxn, due: coordinator.Due) -> r.AskVote | r.Decide:
    """The message that is due, made from the rows (M1, M2)."""
    row, head = txn.row, head_of(txn.row)
    if due.what == "ask" and txn.votes_row is not None:
        asks = txn.votes_row.asks != "REOPEN" and txn.pending is not None
        writers = txn.pending.writers if asks and txn.pending is not None else ()
        scopes = txn.partitions[due.partition].scopes
        return r.AskVote(
            row.txn_id,
            head,
            txn.votes_row.votes_round,
            txn.votes_row.asks,
            turn.across.exactly.get(row.txn_id, False),
            receipts_of(writers, scopes),
        )
    verdict: r.Verdict = "ABORT" if due.what == "abort" else "COMMIT"
    at = row.commit_timestamp if due.what == "commit" else 0
    return r.Decide(row.txn_id, head, verdict, at, row.reason if due.what == "abort" else "")
