"""Programs that use anabranch, for reading and running. None of them is part of the wheel."""
