"""What Spark does with streams: audit, bulk load, export, compaction (`docs/spark.md`)."""
