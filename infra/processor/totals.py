"""An example of a processor, to be replaced by your own: it counts the orders of each customer."""

from __future__ import annotations

import json
from typing import Any

import anabranch

app = anabranch.Processor("shop/totals", tasks=4)
orders, totals = app.input("shop/orders"), app.output("shop/totals", value=json)
counts = app.store("counts", value=json)


@app.on(orders)
def count(event: Any) -> None:
    """Count an order of the customer who is its key."""
    counts[event.key] = counts.get(event.key, 0) + 1
    totals.write(counts[event.key], key=event.key)
