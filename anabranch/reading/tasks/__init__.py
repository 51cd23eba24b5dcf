"""Reading for the tasks of a processor (``docs/processing.md``)."""
