"""Every decoder that reads the outside under random and mutated bytes: a bounded part of `scripts/fuzz`.

Inputs are tried in a child process: only named errors, little CPU time and memory for each, and no crash.
"""

from __future__ import annotations

import pytest

from tests.fuzz.runner import fuzz
from tests.fuzz.targets import TARGETS

SEED = 20_260_301
SOME = 500
MANY = 1_500


@pytest.mark.slow(8)
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(SOME, marks=pytest.mark.long),
        pytest.param(MANY, marks=pytest.mark.soak),
    ],
)
def test_decoders_take_anything(inputs: int) -> None:
    report = fuzz(list(TARGETS), SEED, inputs=inputs, limit=650)
    assert not report.findings, "\n".join(finding.text(SEED) for finding in report.findings)
    assert report.done == {name: len(target.seeds()) + inputs for name, target in TARGETS.items()}
