"""Programs that use anabranch, to read and to run. The wheel does not include them."""
