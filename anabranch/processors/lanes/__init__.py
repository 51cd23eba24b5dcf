"""Lanes: the commands of each, in turns, and trouble with their topics."""
