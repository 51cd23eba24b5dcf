"""Draws docs/images/overview.svg: ``python docs/images/draw_overview.py``."""

from __future__ import annotations

from pathlib import Path

WATER, DEEP, GREEN, RED, INK, PALE = (
    "#4c9be8",
    "#1f5fa8",
    "#3aa76d",
    "#d1495b",
    "#22313f",
    "#eef4fb",
)
out: list[str] = []


def text(
    x: float,
    y: float,
    words: str,
    size: int = 15,
    colour: str = INK,
    anchor: str = "middle",
    weight: str = "normal",
) -> None:
    out.append(
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'
    )


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str = DEEP) -> None:
    out.append(
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="9" fill="{fill}" stroke="{stroke}" stroke-width="1.6"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = DEEP, dash: str = "") -> None:
    style = f' stroke-dasharray="{dash}"' if dash else ""
    out.append(
        f'<path d="M{x1},{y1} C{(x1 + x2) / 2},{y1} {(x1 + x2) / 2},{y2} {x2},{y2}" fill="none" stroke="{colour}" stroke-width="2.2" marker-end="url(#tip)"{style}/>'
    )


def batches(x: float, y: float, colours: str, size: int = 17) -> None:
    names = {"b": WATER, "g": GREEN, "r": RED, "s": "#f2b544"}
    for i, c in enumerate(colours):
        out.append(
            f'<rect x="{x + i * (size + 3)}" y="{y}" width="{size}" height="{size + 5}" rx="3" fill="{names[c]}"/>'
        )


text(
    480,
    32,
    "One transaction, many processes: whole in the stream, or not at all",
    21,
    weight="bold",
)
for i, (name, colour) in enumerate(
    (
        ("process A: begin, write", WATER),
        ("process B: join(token), write", WATER),
        ("process C: killed half-way", RED),
        ("any Kafka client", GREEN),
    )
):
    y = 70 + i * 66
    box(20, y, 215, 44, PALE, colour)
    text(127, y + 27, name, 14)
    arrow(235, y + 22, 318, 140 + i * 26, colour)
box(320, 108, 220, 132, "white")
text(430, 130, "journal of nyc/flights", 15, weight="bold")
batches(338, 146, "bbrbgbrbgb")
batches(338, 180, "bgbrbbgbbr")
text(430, 228, "writes of open transactions", 13, "#667")
box(320, 292, 220, 92, PALE)
text(430, 316, "controller", 16, weight="bold")
text(430, 338, "decides, merges, answers", 13)
text(430, 358, "one native Kafka transaction a round", 12)
text(430, 376, "(RocksDB: rebuilt from the log)", 12, "#667")
arrow(430, 240, 430, 290)
box(20, 352, 215, 44, PALE, DEEP)
text(127, 379, "process D: commit(token, …)", 13)
arrow(235, 374, 318, 344)
arrow(540, 322, 628, 172)
arrow(540, 340, 628, 292)
arrow(540, 356, 628, 372)
box(630, 108, 310, 132, "white")
text(785, 130, "stream nyc/flights", 15, weight="bold")
batches(650, 146, "ssbbbbbgg")
batches(650, 180, "sbbbbgggs")
text(785, 228, "decided events only, in commit order", 13, "#667")
box(630, 268, 310, 46, "white")
text(785, 296, "history: which commit put what where, when", 13)
box(630, 350, 310, 46, "white")
text(785, 378, "status log, replies: the outcome, for ever", 13)
text(785, 434, "readers: any Kafka consumer with read_committed,", 13, "#667")
text(785, 452, "never held up by somebody else's open transaction", 13, "#667")
text(430, 434, "Red is nowhere on the right: a writer without a", 13, RED)
text(430, 452, "receipt leaves nothing. Yellow: small commits,", 13, RED)
text(430, 470, "seen at once while the big one is open.", 13, RED)
body = "\n".join(out)
svg = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 490" font-family="Helvetica, Arial, sans-serif">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{DEEP}"/></marker></defs>
<rect width="960" height="490" fill="#fbfdff"/>
{body}
</svg>
"""
Path(__file__).with_name("overview.svg").write_text(svg, "utf-8")
