"""The care of streams' topics outside of rounds: they are created, grown, truncated, deleted, scaled, watched."""
