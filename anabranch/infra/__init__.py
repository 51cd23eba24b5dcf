"""The embedded broker, compose and deployment files."""
