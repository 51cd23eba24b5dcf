"""Pipelines between Spark and streams: bulk load, export, compaction (`docs/spark.md`)."""
