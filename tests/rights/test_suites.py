"""A part of the suites, over SASL_SSL with the rights of the table alone; ``pytest --secured tests`` runs all."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.broker
ROOT = Path(__file__).parents[2]
# What controllers do to a log, and all kinds of calls of clients, but what takes long.
PART = (
    "tests/contract/test_producer.py",
    "tests/contract/test_declarations.py",
    "tests/behaviour/test_client_scaling.py",
    "tests/behaviour/test_write_batch.py",
)
NOT = "memory or v0 or forked"


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_part_of_the_suites() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, "--secured", "-k", f"not ({NOT})", *PART],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-8000:]
    assert " passed" in found.stdout
