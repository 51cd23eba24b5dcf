"""The source of `format("anabranch")`: snapshots, and micro-batches as they are committed."""
