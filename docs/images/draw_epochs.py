"""Makes the history that docs/images/epochs.svg shows, on a running cluster, and draws it.

anabranch dev &  ANABRANCH_BOOTSTRAP=127.0.0.1:9092 python docs/images/draw_epochs.py
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import anabranch

PICTURE = Path(__file__).with_name("epochs.svg")
OLD_EVENTS = 4_000


def main() -> None:
    """Split, merge, commit what is older than both; and scale once more."""
    scope = f"nyc-{uuid.uuid4().hex[:4]}"
    stream = f"{scope}/flights"
    with anabranch.connect(timeout=60) as client:

        def commit(times: int) -> None:
            for number in range(times):
                with client.begin(scope) as txn:
                    for key in range(12):
                        txn.write(stream, b"%d" % number, b"plane-%d" % (key * 7 + number))
                    txn.commit()

        client.create_stream(stream, segments=2)
        commit(9)
        old = client.begin(scope, keepalive=600)
        for number in range(OLD_EVENTS):
            old.write(stream, b"old %d" % number, b"plane-%d" % (number % 97))
        old.flush()
        client.scale(stream, segments=4)
        commit(14)
        one, two = client.describe(stream).segments[1:3]
        client.scale(stream, seal=[one.segment_id, two.segment_id], ranges=[(one.low, two.high)])
        commit(12)
        old.commit()
        commit(9)
        client.scale(stream, segments=1)
        commit(5)
    subprocess.run(
        [sys.executable, "-m", "anabranch.cli", "stream", "draw", stream, "-o", str(PICTURE)],
        check=True,
    )


if __name__ == "__main__":
    main()
