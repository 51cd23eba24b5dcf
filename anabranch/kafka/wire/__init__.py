"""The Kafka protocol as far as the log needs it: connections, messages, what error codes mean."""

import sys

# kio imports hypothesis where that is installed, to describe its types to it: a third of the time
# in which a process that uses us starts.
if "hypothesis" not in sys.modules:
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        import kio.static.primitive  # noqa: F401
    finally:
        del sys.modules["hypothesis"]
