"""`anabranch quickstart`: the whole idea on real data, with kills, checked row by row."""
