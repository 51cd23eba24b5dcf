"""Events in and out: `events` has `anabranch read` and `write`; `load` has `anabranch load`, `load_csv` its files.

The same imports are allowed as in `anabranch.cli`; NumPy and pyarrow only in `load_csv`.
"""
