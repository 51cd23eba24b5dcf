"""`anabranch stream`, and the picture of a stream."""
