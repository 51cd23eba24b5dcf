"""The long-lived services: thin loops round the core."""
