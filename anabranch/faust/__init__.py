"""`anabranch.faust.App` runs ordinary Faust agents on anabranch streams, exactly once (extra ``faust``)."""

from anabranch.extras import need

need("faust", "rocksdict", extra="faust")

from anabranch.faust.app import App as App  # noqa: E402 - a refusal comes first

__all__ = ["App"]
