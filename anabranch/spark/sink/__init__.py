"""The sink of `format("anabranch")`: writes rows as events, and each batch as one transaction."""
