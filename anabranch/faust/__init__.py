"""`anabranch.faust.App`: ordinary Faust agents on anabranch streams, exactly once (extra ``faust``)."""

from anabranch.faust.app import App as App

__all__ = ["App"]
