"""The generated parts of docs/security.md, from the table of rights.

``python -m tests.rights.page`` writes them.
"""

from __future__ import annotations

import re
from pathlib import Path

from anabranch.topics import rights
from anabranch.topics.rights import Right

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
PART = re.compile(r"(<!-- (rights|commands) -->\n).*?(<!-- end -->\n)", re.DOTALL)
# Of an installation with the usual prefix, a scope, a stream and a group.
ROLES: dict[str, tuple[Right, ...]] = {
    "controller": tuple(rights.controller_rights("anabranch", "shop")),
    "client": tuple(rights.client_rights()),
    "etl": tuple(rights.client_rights(lane="etl")),
    "operator": tuple(rights.client_rights(lane="admin")),
    "lane-maker": tuple(rights.lane_maker_rights()),
    "writer": tuple(rights.writer_rights("shop/orders")),
    "reader": tuple(rights.reader_rights(["billing"], "shop/orders")),
    "watcher": tuple(rights.watcher_rights(["billing"], "shop/orders")),
    "doctor": tuple(rights.doctor_rights()),
}


def table() -> str:
    """All rights, a line a resource."""
    rows = ["| principal | resource | operations | what for |", "|---|---|---|---|"]
    for role, found in ROLES.items():
        for first, same in rights.by_resource(found):
            name = f"{first.kind} `{first.name}`" + ("…" if first.prefixed else "")
            operations = ", ".join(right.operation for right in same)
            rows.append(f"| {role} | {name} | {operations} | {'; '.join(r.why for r in same)} |")
    return "\n".join(rows) + "\n"


def commands() -> str:
    """The same as commands, one for the resources of each kind with the same operations."""
    lines = [
        line for role, found in ROLES.items() for line in rights.acl_commands(f"User:{role}", found)
    ]
    return "```\n" + "\n".join(lines) + "\n```\n"


def renewed(page: str) -> str:
    """The page with its generated parts as they should be."""
    made = {"rights": table, "commands": commands}
    return PART.sub(lambda part: part[1] + made[part[2]]() + part[3], page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
