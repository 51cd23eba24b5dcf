"""A control partition whose streams scale: `World`, and where its rounds land on the streams' partitions.

It plays the rest of the shell too: partitions are added, carriers copy run by run, and the history records are
made of each round. `picture` is what the simulation's checks of epochs look at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from anabranch.batches.records import Record
from anabranch.core import rows as k
from anabranch.core.decisions.merge import runs_to_stage
from anabranch.core.decisions.scale import partitions_added
from anabranch.core.decisions.streams import give_up_stream
from anabranch.core.decisions.turn import Turn
from anabranch.core.history_records import Tail, history_records
from anabranch.core.journal_index import extents_by_place
from anabranch.core.round import Landed, Round
from anabranch.core.stream_states import ACTIVE
from anabranch.protocol.schemas import records as r
from anabranch.topics.names import journal_topic, stream_topic
from tests.core.harness import World
from tests.core.tables import txn_rows
from tests.sim.picture import Picture, Seen

Taken = dict[
    tuple[str, int], list[tuple[int, int, int]]
]  # (stream, number) -> (writer, first, end)


class ScaledWorld(World):
    """Streams in scope nyc, of two segments each at first."""

    def __init__(self, streams: Sequence[str], **changes: Any) -> None:
        self.tails: dict[str, Tail] = defaultdict(Tail)
        self.stream_ends: dict[tuple[str, int], int] = defaultdict(int)
        self.history: dict[str, list[tuple[Seen, Any]]] = defaultdict(list)
        self.merged: dict[str, Taken] = {}
        self.carried: set[bytes] = set()
        self.copied: dict[bytes, Taken] = defaultdict(dict)
        super().__init__(**changes)
        self.find_scope("nyc")
        for stream in streams:
            self.create(stream)
            self.created(stream, 0, 0)

    def close(self, turn: Turn, expired_ms: int | None = None, asker: str | None = None) -> str:
        """See `World`; the round's data lands, its history is written."""
        said = super().close(turn, expired_ms, asker)
        self._land(self.round)
        return said

    def _land(self, round_: Round) -> None:
        landed: dict[tuple[int, int], Landed] = {}
        touched = set()
        for i, step in enumerate(round_.history):
            for j, part in enumerate(getattr(step, "parts", ())):
                if part.staged is None:
                    count = len(part.events) or sum(run.records for run in part.runs)
                    place = step.stream, part.partition
                    first = self.stream_ends[place]
                    self.stream_ends[place] += count
                    landed[i, j] = Landed(first, first + count, count)
                    touched.add(place)
        for place in touched:
            self.stream_ends[place] += 1  # the marker
        for commit in round_.commits:
            taken = self.merged.setdefault(self.label(commit.txn_id), {})
            for part in commit.parts:
                key = commit.stream, part.segment_id & 0xFFFFFFFF
                assert key not in taken, "one part for each segment"
                runs = [(run.writer, run.first, run.end) for run in part.runs]
                taken[key] = runs if part.staged is None else self.copied[commit.txn_id][key]
        for stream, records in history_records(round_, landed, self.tails).items():
            found = self.history[stream]
            base = len(found)
            found += [(Seen(Record(0, 0, b"", b""), base, (1, 1)), each) for each in records]
            self.tails[stream].last = len(found) - 1

    # -- the rest of the shell ---------------------------------------------------------------------

    def grow(self) -> str:
        """Add the partitions that are wanted."""
        said = []
        for stream, row in sorted(self.state.streams.items()):
            if row.wanted_partitions > row.partitions:
                turn = self.new_turn()
                partitions_added(turn, stream, row.wanted_partitions)
                said.append(self.close(turn))
        return "; ".join(said)

    def carry(self, runs: int = 1) -> int:
        """Each carrier copies some runs; how many did. As in the shell, the row follows the data."""
        moved = 0
        for txn_id in sorted(self.state.committing):
            txn = self.state.open[txn_id]
            if txn.pending is None or not self.index.covers(txn.pending.writers):
                continue
            if any(self.state.streams[stream].state != ACTIVE for stream in txn.participants):
                continue
            for (stream, number), row in sorted(txn.staged_merges.items()):
                if row.done:
                    continue
                left = runs_to_stage(self.index, row, extents_by_place(txn.pending.writers))
                chunk = left[:runs]
                place = stream, row.partition
                first = self.stream_ends[place]
                count = sum(run.records for run in chunk)
                self.copied[txn_id].setdefault((stream, number), []).extend(
                    (run.writer, run.first, run.end) for run in chunk
                )
                self.stream_ends[place] += count + 1
                after = r.StagedMergeRow(
                    row.txn_id, stream, number, row.source, row.partition,
                    cursor=chunk[-1].first + 1,
                    first=row.first if row.first >= 0 else first,
                    end=first + count,
                    count=row.count + count,
                    done=len(left) == len(chunk),
                )  # fmt: skip
                self.log_rows([(k.staged_merge_key(txn_id, stream, number), after)])
                self.carried.add(txn_id)
                moved += 1
        return moved

    def lose(self, stream: str) -> None:
        """Somebody deleted a topic of it."""
        turn = self.new_turn()
        give_up_stream(turn, stream, "there is no topic")
        self.close(turn)

    def settle(self) -> None:
        """Go on until everything that was decided is merged."""
        for _ in range(60):
            self.grow()
            self.carry()
            self.wait(self.settings.collate_ms + 60)
            wanting = any(s.wanted_partitions > s.partitions for s in self.state.streams.values())
            if not self.state.committing and not wanting:
                return
        raise AssertionError(f"never merged: {[self.label(t) for t in self.state.committing]}")

    def picture(self) -> Picture:
        """What the checks of epochs look at, but for the events themselves."""
        state = self.state
        rows = {row.txn_id: row for row in txn_rows(state)}
        picture = Picture(
            events=defaultdict(list),
            history=dict(self.history),
            rows=rows,
            streams=dict(state.streams),
            scopes=dict(state.scopes),
            unfinished=[txn.row for txn in state.open.values()],
            participants={txn_id: state.participants(txn_id) for txn_id in rows},
            epoch_rows={stream: set(epochs) for stream, epochs in state.epochs.items()},
            carried=self.carried,
        )
        for stream, row in state.streams.items():
            for topic in (stream_topic(stream), journal_topic(stream)):
                picture.topic_partitions[topic] = row.partitions
        return picture
