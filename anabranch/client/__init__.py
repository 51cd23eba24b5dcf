"""The client's parts. `anabranch` itself exports all that is public."""
