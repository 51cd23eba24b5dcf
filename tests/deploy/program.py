"""A processor for monitoring: its handler fails for one value, and says so in dead letters."""

from __future__ import annotations

from typing import Any

import anabranch

BAD = b"bad"
app = anabranch.Processor("shop/totals", tasks=4, dead_letter="shop/errors", retries=0)
orders, sums = app.input("shop/orders"), app.output("shop/sums")


@app.on(orders)
def total(event: Any) -> None:
    """Copy it."""
    if event.value == BAD:
        raise ValueError("bad")
    sums.write(event.value, key=event.key)
