"""`anabranch spark`."""
