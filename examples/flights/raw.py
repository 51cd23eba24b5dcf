"""How to run examples/raw_client.py, the writer that knows only the protocol's page."""

from __future__ import annotations

import sys
from pathlib import Path

from anabranch.cli.session import Target

PROGRAM = Path(__file__).parents[1] / "raw_client.py"


def raw_command(
    target: Target, stream: str, csv_file: Path, key: str, token: str
) -> list[str] | None:
    """The command that writes a CSV file as one more writer and prints its receipt.

    None where it can't reach the cluster: it takes no further settings.
    """
    if target.kafka:
        return None
    return [
        *(sys.executable, str(PROGRAM), stream),
        *("--bootstrap", target.bootstrap, "--prefix", target.prefix),
        *("--csv", str(csv_file), "--key", key, "--token", token),
    ]
