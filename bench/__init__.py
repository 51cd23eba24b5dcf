"""Programs that run anabranch and its peer side by side in one run and print ratios. See `bench.__main__`."""
