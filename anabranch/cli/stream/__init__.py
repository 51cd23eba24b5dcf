"""`anabranch stream`."""
