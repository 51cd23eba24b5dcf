"""The sink of `format("anabranch")`: rows become events, a batch one transaction."""
