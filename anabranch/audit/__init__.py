"""The audit: a check that the logs of a scope agree with each other."""
