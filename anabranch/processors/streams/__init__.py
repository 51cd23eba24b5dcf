"""The care of streams' topics, beside the rounds: made, watched, cut, scaled."""
