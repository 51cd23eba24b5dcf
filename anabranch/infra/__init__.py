"""The embedded broker, for tests and development."""
