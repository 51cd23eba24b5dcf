"""`anabranch processor` and `bridge`: `commands` ask about processors and change them, `run` has their workers.

The same imports are allowed as in `anabranch.cli`.
"""
