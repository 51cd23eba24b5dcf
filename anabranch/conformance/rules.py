"""The rules for clients of docs/protocol.md that the kit checks, and the report of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# The number before the dot is the section of docs/protocol.md. An id is never given to another rule.
RULES = {
    "R2.1": "A command is framed: level, type, and exactly one record in Avro's binary encoding.",
    "R2.2": "A reply of an unknown level or type, or that is not exactly one record, is never an answer.",
    "R3.1": "`ab.cid` has 16 random bytes, new for each command.",
    "R3.2": "`ab.reply` names an existing partition of `replies`, the same one in all commands of a client.",
    "R3.3": "A repeated command has the same bytes, correlation id and partition.",
    "R3.4": "Replies under ids of which no answer is expected are dropped unread.",
    "R3.5": "A reply whose `command` does not match is dropped, and the client keeps waiting.",
    "R3.6": "An `Outcome` of another transaction is dropped, unless the command claims a name or number.",
    "R3.7": "A new attempt after a refusal has a new correlation id.",
    "R3.8": "Commands come from one idempotent producer, outside of native transactions.",
    "R4.1": "A command goes to the control partition of its scope or transaction, `FindScope` to partition 0; "
    "`Touch`, `ListRuns` and `LabelWriter` to that of the stream's scope.",
    "R5.1": "A transaction id has the control partition, the time, and 8 random bytes.",
    "R5.2": "Each transaction has a new secret of 32 random bytes.",
    "R5.3": "A token has the layout and the MAC of the section.",
    "R5.4": "A joined process uses the token that it was given, unchanged.",
    "R5.5": "If a name is committed already, its outcome is the result.",
    "R5.6": "Heartbeats come every third of the keepalive while a transaction is open.",
    "R5.7": "After its end a transaction takes no more calls: they fail by name.",
    "R6.1": "Each writer touches a stream, under its own number, before its first write there.",
    "R6.2": "A writer writes by the stream epoch and segments of `Touched`, also after a scaling.",
    "R7.1": "A record goes to the partition of its key's segment.",
    "R8.1": "A record of a transaction has exactly one header `ab.txn`, of 28 bytes, with a writer that is not 0.",
    "R8.2": "Key, value, headers and time reach the stream unchanged, each event exactly once.",
    "R8.3": "Journals are written by an idempotent producer, outside of native transactions.",
    "R8.4": "Each process, and each join, is a new writer of 64 random bits.",
    "R8.5": "Header names that begin with `ab.` are refused.",
    "R8.6": "A write that failed or timed out leads to no receipt that leaves the record out or counts it twice.",
    "R8.7": "A plain record has no header that begins with `ab.`, and is committed once.",
    "R9.1": "A receipt counts exactly the writer's records, with the sum of their checksums.",
    "R9.2": "An extent begins at or before the writer's first record and ends after its last one.",
    "R9.3": "Sequences of receipts begin at 1 and rise, and a receipt covers those before it.",
    "R9.4": "`seen` of a receipt is the highest hybrid time that the client received.",
    "R10.1": "A commit has its own writers' receipts, and of the other writers exactly the receipts given to it.",
    "R10.2": "`wait_ms` is at most 600,000, and the client waits longer than that for the answer.",
    "R10.3": "The client reports the outcome as it was answered: transaction, commit timestamp and counts.",
    "R10.4": "After a refusal that leaves the transaction open, it can be corrected and committed.",
    "R10.5": "Repeated aborts succeed; an abort of a committed transaction is `AlreadyCommitted`.",
    "R10.6": "A number of a series commits once.",
    "R10.7": "`prepare.by` is the SHA-256 of the coordinator's secret; a repeated prepare has the same `attempt`.",
    "R10.8": "A prepared transaction takes no more writes, and ends only by a decision, which has the secret.",
    "R10.9": "A commit with `ab.decided` is reported as decided or merged, and after another commit as merged.",
    "R10.10": "Rows of a session commit once each and in their order; a refused row is reported, and no other one.",
    "R11.1": "An unanswered command is repeated after about 2 seconds, then with growing pauses.",
    "R11.2": "If a commit is not answered, `Resolve` says its outcome, sent by the same producer.",
    "R11.3": "Before the refusal of a commit that was sent more than once is reported, `Resolve` is asked.",
    "R11.4": "An unanswered transaction is never sent again as another one.",
    "R11.5": "If no outcome can be learned in time, the client says `OutcomeUnknown`.",
    "R11.6": "`NotReady` is tried again; a refusal of an unknown code is reported, and not tried again.",
    "R12.1": "`ab.ht` of each command is the highest hybrid time that the client received.",
    "R12.2": "Times of dropped replies and of replies to `FindScope` are not kept.",
    "R12.3": "A lower time, of a former leader, does not replace a higher one; `seen` of a token counts.",
    "R13.1": "A reader gets each committed event once, in the order of its key, and no other records.",
    "R13.2": "By the history, an event has its `CommitRecord`'s timestamp, and foreign records are skipped.",
}  # fmt: skip


@dataclass
class Report:
    """The result of a run, by rule and by scenario.

    ``failures``: (rule, scenario, what was seen). ``skipped``: scenarios that were not played, with the reason.
    """

    passed: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    played: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    client: str = ""
    scenario: str = ""  # under way

    def check(self, rule: str, kept: bool, seen: str) -> bool:
        """Count one check of a rule. ``seen``: what the client did, for a rule that is not kept."""
        if rule not in RULES:
            raise KeyError(rule)
        if kept:
            self.passed[rule] += 1
        else:
            self.failures.append((rule, self.scenario, seen))
        return kept

    @property
    def broken(self) -> list[str]:
        """The rules that were not kept, in the page's order."""
        found = {rule for rule, _, _ in self.failures}
        return [rule for rule in RULES if rule in found]

    def lines(self) -> list[str]:
        """The report as text."""
        out = []
        for rule, text in RULES.items():
            failures = [f for f in self.failures if f[0] == rule]
            state = "BROKEN" if failures else "kept" if self.passed[rule] else "not seen"
            out.append(f"{rule:6} {state:9}{self.passed[rule]:5}  {text}")
            out += [f"{'':8}{scenario}: {seen}" for _, scenario, seen in failures[:3]]
            if len(failures) > 3:
                out.append(f"{'':8}and {len(failures) - 3} more")
        out += [f"not played: {name}: {why}" for name, why in self.skipped.items()]
        kept = sum(1 for rule in RULES if self.passed[rule] and rule not in self.broken)
        took = sum(self.played.values())
        out.append(
            f"{self.client or 'the client'}: {kept} rules kept, {len(self.broken)} broken, "
            f"{len(RULES) - kept - len(self.broken)} not seen; "
            f"{len(self.played)} scenarios in {took:.0f} s, {len(self.skipped)} not played"
        )
        return out

    def document(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "client": self.client,
            "rules": {
                rule: {
                    "passed": self.passed[rule],
                    "failures": [
                        {"scenario": scenario, "seen": seen}
                        for broken, scenario, seen in self.failures
                        if broken == rule
                    ],
                }
                for rule in RULES
            },
            "scenarios": {name: round(seconds, 2) for name, seconds in self.played.items()},
            "not_played": self.skipped,
        }
