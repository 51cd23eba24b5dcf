"""Raw access to brokers: a log, and producers of whole batches, over Kafka's protocol."""

import sys

# kio imports hypothesis if it is installed, to register its types there: that takes a third of a process's start.
if "hypothesis" not in sys.modules:
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        import kio.static.primitive  # noqa: F401
    finally:
        del sys.modules["hypothesis"]
