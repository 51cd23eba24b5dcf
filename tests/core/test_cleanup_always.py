"""Nothing that is needed is ever below the low water, whatever is played."""

from __future__ import annotations

from unittest import mock

from hypothesis import event, given, settings
from hypothesis import strategies as st

from anabranch.core.decisions import cleanup
from anabranch.protocol.schemas import records as r
from tests.conftest import some
from tests.core.cleaning import PLACE, begin, crowd, opened, rebuild, relocate
from tests.core.harness import World, index_rows

moves = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"), st.sampled_from("ABC"), st.integers(1, 3), st.integers(1, 4_000)
        ),
        st.tuples(st.just("reject"), st.sampled_from("ABC"), st.integers(1, 3), st.just(10)),
        st.tuples(st.just("crowd"), st.just(""), st.just(1), st.integers(9_000, 20_000)),
        st.tuples(st.just("plain"), st.just(""), st.integers(1, 3), st.integers(1, 4_000)),
        st.tuples(
            st.sampled_from(("commit", "abort")), st.sampled_from("ABC"), st.just(0), st.just(0)
        ),
        st.tuples(st.just("lead"), st.just(""), st.integers(0, 1), st.just(0)),
    ),
    max_size=40,
)


def check_kept(world: World, written: dict[str, list[tuple[int, int]]]) -> None:
    """What open transactions wrote is in the index, whole, and lies at or above the low water."""
    begins = world.state.low_water.get(PLACE, 0)
    assert begins <= world.index.positions.get(PLACE, 0)
    size = 0
    for label, runs in written.items():
        stored = world.index.runs(world.id(label), *PLACE)
        assert sorted((x.first, x.end) for x in stored) == runs
        assert all(x.batch_base >= begins and x.at >= begins for x in stored)
        size += sum(x.batch_size for x in stored)
    assert world.index.uncommitted.total == size
    plain = world.index.plain_from(world.state, *PLACE)
    assert plain is None or plain >= begins


@settings(max_examples=some(150), deadline=None, print_blob=True)
@given(moves)
def test_whatever_happens_what_is_needed_is_kept(played: list[tuple[str, str, int, int]]) -> None:
    world = opened("A", "B", "C", move_bytes=5_000)
    written: dict[str, list[tuple[int, int]]] = {label: [] for label in "ABC"}
    rejected = dict.fromkeys("ABC", 0)
    cut = relocated = 0
    for what, label, count, size in played:
        if label and label not in written:
            continue
        if what == "write":
            run = world.write(label, f"w{label}", count=count, size=size)
            written[label].append((run.first, run.end))
        elif what == "reject":
            world.write(label, f"w{label}", count=count, size=size, epoch=3)
            rejected[label] += count
        elif what == "crowd":
            crowd(world, size)
        elif what == "plain":
            world.write_plainly(count=count, size=size)
        elif what == "lead" and count:
            world.lead()
            begin(world)
        elif what == "lead":
            before = index_rows(world)
            held = world.index.positions == dict(world.ends)
            rebuild(world)
            world.read_journals()
            if held:
                assert index_rows(world) == before, "the same from the logs alone"
        elif what == "commit":
            runs = written.pop(label)
            world.turn()
            world.commit(label, own=[whole(world, label, runs)] if runs else [])
            world.wait(300)
            row = world.row(label)
            assert row.state == "COMMITTED"
            assert row.committed == sum(last - first for first, last in runs)
            assert row.rejected == rejected[label]
        elif what == "abort":
            written.pop(label)
            world.turn()
            world.abort(label)
            assert world.row(label).rejected == rejected[label]
        world.wait(300)
        if world.memory.cleaning.crowded:
            with mock.patch.object(cleanup, "MAX_MOVED", 2):
                relocated += relocate(world)
        check_kept(world, written)
        cut = world.state.low_water.get(PLACE, 0)
    event(f"cut: {cut > 0}, moved: {relocated > 0}")


def whole(world: World, label: str, runs: list[tuple[int, int]]) -> r.Receipt:
    """A receipt for exactly these."""
    mine = [
        batch for batch in world.journals[PLACE]
        if batch.run.txn_id == world.id(label) and (batch.run.first, batch.run.end) in runs
    ]  # fmt: skip
    crc = sum(batch.run.crc_sum for batch in mine) % (1 << 63)
    extent = r.Extent(*PLACE, runs[0][0], runs[-1][1], sum(end - first for first, end in runs), crc)
    return r.Receipt(world.id(label), world.writer(f"w{label}"), 1, True, (extent,))
