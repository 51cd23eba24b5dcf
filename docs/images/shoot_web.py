"""Takes the pictures of docs/web.md, in some minutes: ``python docs/images/shoot_web.py [MINUTES]``.

It runs a broker, controllers, a shop that commits, and the web page, and looks at them in Chromium.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

import anabranch

HERE = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
FRUIT = ("apples", "pears", "plums", "figs", "cherries")
# Name of the picture -> path, colours, height, and whether the first value is opened.
PICTURES = {
    "web-events": ("streams/shop/orders/events", "light", 720, True),
    "web-overview": ("", "dark", 800, False),
}


@contextmanager
def started(*arguments: str) -> Iterator[dict[str, object]]:
    """A command that prints a line of JSON once it is ready: that line."""
    line = [sys.executable, "-m", "anabranch.cli", *arguments, "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield json.loads(process.stdout.readline() if process.stdout else "")
        finally:
            process.terminate()


def sell(client: anabranch.Client, seconds: float) -> None:
    """Orders that take rows of the stock, now more and now fewer."""
    client.create_stream("shop/orders", segments=2, exist_ok=True)
    client.create_table("shop/stock", exist_ok=True)
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        number += 1
        fruit, count = random.choice(FRUIT), random.randint(1, 9)
        order = {
            "order": 1000 + number,
            "customer": f"customer-{number % 7}",
            "items": [{"name": fruit, "count": count, "price": round(1.5 + count / 8, 2)}],
            "paid": number % 4 > 0,
        }
        with client.begin("shop") as txn:
            txn.write("shop/orders", json.dumps(order).encode(), f"customer-{number % 7}".encode())
            txn.write("shop/stock", b'{"left": %d}' % (500 - number % 400), fruit.encode())
            txn.commit()
        time.sleep(random.random() * (0.02 if int(time.monotonic() / 40) % 2 else 0.2))


def main(minutes: float) -> None:
    with started("dev", "--port", "0", "--controllers", "2") as cluster:
        at = str(cluster["bootstrap"])
        with (
            anabranch.connect(at) as client,
            started("web", "--bootstrap", at, "--port", "0") as web,
            sync_playwright() as playwright,
        ):
            sell(client, minutes * 60)
            waiting = client.begin("shop", name="nightly-load", keepalive=600)
            waiting.write("shop/orders", b"x" * 900_000)
            waiting.flush()
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for name, (path, scheme, height, opens) in PICTURES.items():
                view = {"width": 1180, "height": height}
                page = browser.new_page(color_scheme=scheme, viewport=view)  # type: ignore[arg-type]
                page.goto(f"{web['url']}{path}")
                page.wait_for_selector("#live.good")
                if opens:
                    page.click("summary >> nth=0")
                page.screenshot(path=HERE / f"{name}.png")
            browser.close()
            waiting.abort()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0)
