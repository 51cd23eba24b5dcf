"""The source of `format("anabranch")`: snapshots, and micro-batches of commits."""
