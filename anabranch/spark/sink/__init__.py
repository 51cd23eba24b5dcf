"""The sink of `format("anabranch")`: it writes rows as events, and each batch as one transaction."""
