"""Programs that run anabranch and its peer side by side in one run and print ratios (`bench.__main__`)."""
