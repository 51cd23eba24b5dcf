"""The parts of the client. Programs import from `anabranch`, which exports all that is public."""
