"""Reading for the tasks of a processor (``docs/inside/processing.md``)."""
