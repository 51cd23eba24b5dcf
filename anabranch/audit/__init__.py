"""The audit: whether all that the logs say fits together."""
