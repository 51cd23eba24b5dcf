"""An independent judge of recorded histories: what clients asked and were told, what readers saw, what the log holds.

`docs/checker.md` is its design. It imports nothing of `anabranch`, but for `anabranch.schemas`.
"""
