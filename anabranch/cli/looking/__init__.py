"""`anabranch group`, `write`, `doctor` and `web`."""
