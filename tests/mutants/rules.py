"""The rules of transactions over control partitions, the bugs that break each one, and what finds these."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.core.across import planted, test_random_leaders
from tests.mutants.catalogue import CATALOGUE, HISTORIES, Mutant

ACROSS = Path(__file__).parents[2] / "docs" / "inside" / "across.md"
_RULE = re.compile(r"⚑ (?:\*\*)?([A-Z]\d)\. ")
_MARKED = re.compile(r"⚑ (?![a-z])")  # and not "rules marked ⚑ have"
_BREAKS = re.compile(r"([A-Z]\d): ")
_TABLE = re.compile(r"(<!-- rules -->\n).*?(?=<!-- end of rules -->\n)", re.DOTALL)

Found = Mapping[str, Mapping[str, Mapping[str, Any]]]


def rules() -> list[str]:
    """The names of all rules, in the page's order. `AssertionError`: a rule has no name, or two have one."""
    page = ACROSS.read_text()
    found = _RULE.findall(page)
    assert len(found) == len(_MARKED.findall(page)), "each rule marked ⚑ has a name, as M1"
    assert len(found) == len({*found}), "two rules have one name"
    return found


def bugs(rule: str) -> list[Mutant]:
    """The planted bugs that break a rule: their docstrings begin with its name."""
    return [m for m in CATALOGUE if (at := _BREAKS.match(m.breaks)) and at[1] == rule]


def finders(mutant: Mutant, found: Found) -> Iterator[str]:
    """What finds a bug, as the page says it."""
    mine = found.get(mutant.name, {})
    own = mine.get("own", {})
    if own.get("found"):
        yield f"simulator, in {seeds_of(own)}"
    elif mine.get("checker", {}).get("found"):
        yield f"checker in the simulator, in {seeds_of(mine['checker'])}"
    seed = test_random_leaders.PLANTED.get(mutant.name)
    if seed is not None:
        yield f"history, seed {seed}"
    if mine.get("tests", {}).get("found") and mutant.suite != HISTORIES:
        yield f"`{mutant.suite.removeprefix('tests/')}`"


def seeds_of(hunt: Mapping[str, Any]) -> str:
    """How many seeds were played until a bug was found."""
    return f"{hunt['tries']} seed{'s' if hunt['tries'] > 1 else ''}"


def in_model(rule: str) -> list[int]:
    """The seeds at which the model of the rules finds bugs that break this one."""
    return [seed for name, seed in planted.SEEDS.items() if name.startswith(f"{rule.lower()}_")]


def with_rules(page: str, found: Found) -> str:
    """The page of planted bugs with the table of rules as it should be."""
    lines = ["| rule | bug | what it breaks | found by |", "| --- | --- | --- | --- |"]
    for rule in rules():
        seeds = [str(seed) for seed in in_model(rule)]
        model = [f"model, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"] if seeds else []
        for mutant in bugs(rule):
            by = [*finders(mutant, found), *model]
            what = mutant.breaks.removeprefix(f"{rule}: ")
            lines.append(f"| {rule} | {mutant.name} | {what} | {'; '.join(by) or 'nothing'} |")
    table = "\n".join(lines)
    return _TABLE.sub(lambda match: f"{match[1]}{table}\n", page)
