"""A controller is frozen in the middle of a scaling, a rolling commit or a merge that is staged.

Another takes over and finishes it; then the first one continues, its carriers too. No segment may be merged twice
or by halves, the first one may append nothing more, and nothing may be left of the merge.
The moments are those of the real service: carriers have threads.
"""

from __future__ import annotations

import pytest

from anabranch.ports import Log
from tests.conftest import Broker
from tests.crash.reshaping import (
    CHUNK_BYTES,
    GROW,
    ROLL,
    ROLL_TWICE,
    STAGED_MERGE,
    WIDEN,
    Reshaping,
)
from tests.crash.test_zombies import Moment, haunt
from tests.workload.zygote import Zygote

MERGE, RESERVE, CHUNK, EPOCH = (
    "*of a round with *data*",
    "*of a round with *staged_merge*",
    "*>chunk:*",
    "*of a round with *epoch*",
)

SCALINGS = [
    Moment(GROW, "append:status", "before", 1, "*of a round with *stream*"),
    Moment(GROW, "end:commit", "after", 1, "*of a round with *stream*"),
    Moment(GROW, "add_partitions:stream", "before"),
    Moment(GROW, "add_partitions:stream", "after"),
    Moment(GROW, "add_partitions:journal", "before"),
    Moment(GROW, "add_partitions:journal", "after"),
    Moment(GROW, "append:*", "before", 1, EPOCH),
    Moment(GROW, "append:*", "after", 2, EPOCH, few=True),
    Moment(GROW, "end:commit", "before", 1, EPOCH),
    Moment(GROW, "end:commit", "after", 1, EPOCH),
    Moment(WIDEN, "append:*", "after", 1, EPOCH),
    Moment(WIDEN, "end:commit", "before", 1, EPOCH, few=True),
]
ROLLING = [
    Moment(ROLL, "after-decision", "after"),
    Moment(ROLL, "append:*", "before", 1, MERGE),
    Moment(ROLL, "append:*", "after", 1, MERGE),
    Moment(ROLL, "append:*history*", "before", 1, MERGE),
    Moment(ROLL, "append:*history*", "after", 1, MERGE, few=True),
    Moment(ROLL, "end:commit", "before", 1, MERGE),
    Moment(ROLL, "end:commit", "after", 1, MERGE),
    Moment(ROLL, "table:rows", "before", 1, MERGE),
    Moment(ROLL_TWICE, "after-decision", "after"),
    Moment(ROLL_TWICE, "append:*", "after", 1, MERGE),
    Moment(ROLL_TWICE, "end:commit", "before", 1, MERGE, few=True),
]
CARRIED = [
    Moment(STAGED_MERGE, "after-decision", "after"),
    Moment(STAGED_MERGE, "add_partitions:stream", "before"),
    Moment(STAGED_MERGE, "add_partitions:journal", "after"),
    Moment(STAGED_MERGE, "append:*", "before", 1, RESERVE),
    Moment(STAGED_MERGE, "append:*", "after", 1, RESERVE),
    Moment(STAGED_MERGE, "end:commit", "before", 1, RESERVE),
    Moment(STAGED_MERGE, "end:commit", "after", 1, RESERVE),
    Moment(STAGED_MERGE, "append:stream", "before", 1, CHUNK),
    Moment(STAGED_MERGE, "append:stream", "after", 1, CHUNK),
    Moment(STAGED_MERGE, "append:stream", "after", 3, CHUNK, few=True),
    Moment(STAGED_MERGE, "append:stream", "before", 5, CHUNK),
    Moment(STAGED_MERGE, "append:status", "before", 2, CHUNK),
    Moment(STAGED_MERGE, "append:status", "after", 2, CHUNK),
    Moment(STAGED_MERGE, "end:commit", "before", 1, CHUNK),
    Moment(STAGED_MERGE, "end:commit", "after", 1, CHUNK),
    Moment(STAGED_MERGE, "end:commit", "before", 4, CHUNK, few=True),
    Moment(STAGED_MERGE, "end:commit", "after", 5, CHUNK),
    Moment(STAGED_MERGE, "append:*", "before", 1, MERGE),
    Moment(STAGED_MERGE, "append:*history*", "before", 1, MERGE),
    Moment(STAGED_MERGE, "append:*history*", "after", 1, MERGE),
    Moment(STAGED_MERGE, "end:commit", "before", 1, MERGE),
    Moment(STAGED_MERGE, "end:commit", "after", 1, MERGE, few=True),
    Moment(STAGED_MERGE, "table:rows", "before", 1, MERGE),
]
FEW = [moment for moment in (*SCALINGS, *ROLLING, *CARRIED) if moment.few]


@pytest.mark.broker
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(FEW[::3], id="one of each", marks=pytest.mark.long),
        pytest.param(FEW, id="two of each", marks=pytest.mark.soak),
        pytest.param(SCALINGS, id="scalings", marks=pytest.mark.soak),
        pytest.param(ROLLING, id="rolling", marks=pytest.mark.soak),
        pytest.param(CARRIED, id="carried", marks=pytest.mark.soak),
    ],
)
def test_a_frozen_controller_s_work_is_finished_once(
    broker: Broker, zygote: Zygote, log: Log, subtests: pytest.Subtests, moments: list[Moment]
) -> None:
    for title, why in haunt(zygote, broker, log, moments, Reshaping, CHUNK_BYTES).items():
        with subtests.test(title):
            pytest.fail(why, pytrace=False)
