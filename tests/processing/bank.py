"""A bank in processors: transfers come as a stream of commands, accounts are a table that others write, too.

``anabranch processor run tests.processing.bank:app`` runs it. `judge` says what has to be true afterwards, whatever
was killed: each command has one outcome, each commit changes the accounts by the commands that it carried out, the
total is right at every commit timestamp, and no account is below 0.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import anabranch
from anabranch.processing.app import Processor
from anabranch.types import Event

SCOPE = os.environ.get("ANABRANCH_TRIAL_SCOPE", "bank")
ACCOUNTS = [b"account-%d" % number for number in range(12)]
START, TASKS = 50, 4
NOTE = b"note-"  # rows of others, which no command reads


@dataclass(frozen=True)
class Names:
    """The streams of a bank in a scope."""

    scope: str

    @property
    def commands(self) -> str:
        return f"{self.scope}/transfers"

    @property
    def done(self) -> str:
        return f"{self.scope}/done"

    @property
    def rejected(self) -> str:
        return f"{self.scope}/rejected"

    @property
    def accounts(self) -> str:
        return f"{self.scope}/accounts"

    def create(self, client: anabranch.Client) -> None:
        """Everything, and the accounts."""
        for stream in (self.commands, self.done, self.rejected):
            client.create_stream(stream, segments=2)
        client.create_table(self.accounts, 2)
        with client.begin(self.scope) as txn:
            for key in ACCOUNTS:
                txn.write(self.accounts, b"%d" % START, key)
            txn.commit()


def program(
    names: Names,
    before: Callable[[], None] = lambda: None,
    *,
    concurrent: bool = False,
    **more: Any,
) -> Processor:
    """The processor. ``before``: called between a command's reads and its writes.

    ``concurrent``: its handler is ``async``.
    """
    app = Processor(f"{names.scope}/bank", tasks=TASKS, **more)
    transfers = app.input(names.commands, value=json)
    accounts = app.table(names.accounts, value=json)
    done = app.output(names.done, value=json)
    rejected = app.output(names.rejected, value=json)

    def transfer(event: Any) -> None:
        command = event.value
        source, target = command["from"], command["to"]
        has = accounts[source]
        if has < command["amount"]:
            rejected.write(command, key=event.key)
            return
        gets = accounts[target]
        before()
        accounts[source] = has - command["amount"]
        accounts[target] = gets + command["amount"]
        done.write(command, key=event.key)

    async def transfer_later(event: Any) -> None:
        await asyncio.sleep(0)
        transfer(event)

    app.on(transfers)(transfer_later if concurrent else transfer)
    return app


def command(number: int, source: int, target: int, amount: int) -> dict[str, Any]:
    """A command between two different accounts."""
    there = target if target != source else (target + 1) % len(ACCOUNTS)
    names = [ACCOUNTS[one % len(ACCOUNTS)].decode() for one in (source, there)]
    return {"id": number, "from": names[0], "to": names[1], "amount": amount}


def move(replica: Any, names: Names, source: int, target: int) -> None:
    """A transfer by another program, in a transaction on tables."""

    def transfer(txn: Any) -> None:
        one, other = (ACCOUNTS[n % len(ACCOUNTS)] for n in (source, target))
        has = int(txn.get(names.accounts, one) or b"0")
        if one == other or not has:
            return
        gets = int(txn.get(names.accounts, other) or b"0")
        txn.put(names.accounts, one, b"%d" % (has - 1))
        txn.put(names.accounts, other, b"%d" % (gets + 1))

    replica.transact(transfer)


def judge(
    commands: Mapping[int, dict[str, Any]],
    rows: Iterable[Event],
    outcomes: Iterable[Event],
    names: Names,
) -> Counter[str]:
    """Check all of it. ``rows``: all events of the table; ``outcomes``: of both streams. Returns counts."""
    found = Counter[str]()
    seen: dict[int, str] = {}
    effects: dict[int, Counter[bytes]] = defaultdict(Counter)  # by commit timestamp
    for event in outcomes:
        done = json.loads(event.value or b"")
        number, kind = done["id"], event.stream.rpartition("/")[2]
        assert number not in seen, f"command {number} is {seen[number]}, and then {kind}"
        assert done == commands[number]
        seen[number] = kind
        found[kind] += 1
        if event.stream == names.done:
            effect = effects[event.commit_timestamp or 0]
            effect[done["from"].encode()] -= done["amount"]
            effect[done["to"].encode()] += done["amount"]
    assert seen.keys() == commands.keys(), (
        f"without outcome: {sorted(commands.keys() - seen.keys())[:20]}"
    )
    commits: dict[int, dict[bytes, int]] = defaultdict(dict)
    for event in rows:
        assert event.key is not None
        if not event.key.startswith(NOTE):
            commits[event.commit_timestamp or 0][event.key] = int(event.value or b"0")
    balances: dict[bytes, int] = {}
    for number, (timestamp, changed) in enumerate(sorted(commits.items())):
        changes = {key: value - balances.get(key, 0) for key, value in changed.items()}
        balances |= changed
        assert number == 0 or sum(changes.values()) == 0, (
            f"the total is {sum(balances.values())} at {timestamp}"
        )
        assert min(balances.values()) >= 0, f"{balances} at {timestamp}"
        if timestamp in effects:
            wanted = {key: value for key, value in effects.pop(timestamp).items() if value}
            assert {key: value for key, value in changes.items() if value} == wanted, timestamp
            found["commits"] += 1
        elif number:
            found["of others"] += 1
    assert not {at: one for at, one in effects.items() if any(one.values())}, (
        "outcomes without rows"
    )
    assert sum(balances.values()) == START * len(ACCOUNTS)
    return found


app = program(Names(SCOPE), commit_interval=0.02)
