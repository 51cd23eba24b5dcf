"""`anabranch.faust.App` runs ordinary Faust agents on anabranch streams, exactly once (extra ``faust``).

Start with `app.App`, a subclass of Faust's own: Faust's worker, web and timers run as ever. Another thread runs
a worker of `anabranch.processing`, whose handlers are `agents.AgentHandlers`: they hand events to the agents on
Faust's loop. ``app.Topic`` writes events with the commit; ``refusals`` names what can't be exactly once, and what
to use instead.

Only this folder imports Faust. The folder may import ``processing``, the client and what is below them.
"""

from anabranch.extras import need

need("faust", "rocksdict", extra="faust")

from anabranch.faust.app import App as App  # noqa: E402 - a refusal comes first

__all__ = ["App"]
