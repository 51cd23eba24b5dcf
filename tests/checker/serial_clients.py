"""Clients of the toy service that write, scale or ask: transactions, one-shots, numbered commits, plain writes."""

from __future__ import annotations

from typing import Any

from tests.checker.serial import SCOPE, Open, Task, World
from tests.checker.serial_readers import new_reader, take_snapshot


def new_task(world: World) -> Task:
    """One of all kinds."""
    kinds = [transaction] * 6 + [one_shot] * 3 + [numbered, plain, scale, ask, take_snapshot]
    return world.random.choice([*kinds, new_reader, new_reader])(world)


def _write(world: World, file: str, txn: Open, writer: str, *, is_lost: bool = False) -> Task:
    """Some events of one writer."""
    random, tape = world.random, world.tape
    stream = random.choice(list(world.streams))
    events = [(world.key(), world.new("e")) for _ in range(random.randint(1, 4))]
    rows = [list(event) for event in events]
    op = tape.ask(file, "write", txn=txn.handle, writer=writer, stream=stream, events=rows)
    yield
    if is_lost:
        kept = events[: random.randint(0, len(events))]
        txn.written[writer] += [(stream, key, name) for key, name in kept]
        if random.random() < 0.5:
            tape.told(file, op, "unknown")
        return
    txn.written[writer] += [(stream, key, name) for key, name in events]
    yield
    tape.told(file, op)


def _commit(world: World, file: str, txn: Open, writers: list[str] | None) -> Task:
    """Asked, and answered, or not; without an answer it may take effect at any time later, or never."""
    random, tape = world.random, world.tape
    names = txn.finished if writers is None else list(writers)
    op = tape.ask(file, "commit", txn=txn.handle, writers=writers)
    yield
    luck = random.random()
    if luck < 0.1:
        if random.random() < 0.6:
            world.later.append(lambda: bool(world.decide(txn, names)))  # type: ignore[arg-type]
        yield
        if random.random() < 0.5:
            tape.told(file, op, "unknown")
        return
    if luck < 0.15:
        tape.told(file, op, "failed")  # refused
        return
    done = world.decide(txn, names)
    yield
    if random.random() < 0.1:
        tape.told(file, op, "unknown")
    elif done:
        told: dict[str, Any] = {
            "txn_id": txn.txn_id,
            "timestamp": txn.timestamp,
            "committed": txn.committed,
        }
        tape.told(file, op, **told)
    else:
        tape.told(file, op, "failed")


def transaction(world: World) -> Task:
    """Begun, written to by some processes, committed once or twice, aborted, or left."""
    random, tape, file = world.random, world.tape, world.file
    txn = Open(world.new("t"), f"{world.count:032x}")
    op = tape.ask(file, "begin", txn=txn.handle, scope=SCOPE)
    yield
    world.txns[txn.txn_id] = txn
    tape.told(file, op, txn_id=txn.txn_id)
    done = []
    for _ in range(random.randint(1, 3)):
        # Another process with the token; what it says stands in its own file.
        where = random.choice([file, f"{random.choice('xyz')}{world.lives}"])
        writer = world.new("w")
        is_lost = random.random() < 0.15
        for _ in range(random.randint(1, 2)):
            yield from _write(world, where, txn, writer, is_lost=is_lost)
        if is_lost:
            continue
        if random.random() < 0.8:
            op = tape.ask(where, "finish", txn=txn.handle, writer=writer)
            yield
            if random.random() < 0.9 and txn.state == "open":
                txn.finished.append(writer)
            yield
            if random.random() < 0.9:
                tape.told(where, op, "ok" if writer in txn.finished else "unknown")
                done.append(writer)
    if random.random() < 0.1 and txn.state == "open":
        txn.state = "aborted"  # stale
    if random.random() < 0.15:
        yield from _abort(world, file, txn)
    if random.random() < 0.1:
        return
    taken = [writer for writer in done if random.random() < 0.9]
    for _ in range(random.choice([1, 1, 2])):
        where = random.choice([file, f"{random.choice('xyz')}{world.lives}"])
        yield from _commit(world, where, txn, random.choice([taken, taken, None]))
        yield


def _abort(world: World, file: str, txn: Open) -> Task:
    op = world.tape.ask(file, "abort", txn=txn.handle)
    yield
    if txn.state == "open":
        txn.state = "aborted"
    yield
    world.tape.told(file, op, "ok" if txn.state == "aborted" else "failed")


def one_shot(world: World) -> Task:
    """Its id is unknown before it is committed."""
    random, tape, file = world.random, world.tape, world.file
    txn = Open(world.new("t"), f"{world.count:032x}")
    tape.do(file, "begin", {"txn_id": None}, txn=txn.handle, scope=SCOPE)
    world.txns[txn.txn_id] = txn
    for _ in range(random.randint(1, 3)):
        yield from _write(world, file, txn, "own")
    yield from _commit(world, file, txn, ["own"])


def numbered(world: World) -> Task:
    """The next number of a series, or one that was there before."""
    random, tape, file = world.random, world.tape, world.file
    series = random.choice(["x", "y"])
    txn = Open(world.new("t"), f"{world.count:032x}")
    tape.do(file, "begin", {"txn_id": txn.txn_id}, txn=txn.handle, scope=SCOPE)
    world.txns[txn.txn_id] = txn
    yield from _write(world, file, txn, "own")
    highest = world.series[series][0] if series in world.series else -1
    number = random.choice([highest + 1, highest + 2, max(highest, 0)])
    more = {"writers": ["own"], "series": series, "number": number}
    op = tape.ask(file, "commit", txn=txn.handle, **more)
    yield
    known = world.series.get(series)
    if known is None or number > known[0]:
        world.decide(txn, ["own"])
        world.series[series] = (number, txn)
        holder = txn
    else:
        txn.state = "aborted"
        holder = known[1]
    yield
    if known is not None and number < known[0]:
        tape.told(file, op, "failed")
    elif random.random() < 0.8:
        told: dict[str, Any] = {"txn_id": holder.txn_id, "timestamp": holder.timestamp}
        told |= {"committed": holder.committed, "replayed": holder is not txn}
        tape.told(file, op, **told)
    else:
        tape.told(file, op, "unknown")


def plain(world: World) -> Task:
    """Acknowledged, and committed soon after."""
    random, tape, file = world.random, world.tape, world.file
    name = random.choice(list(world.streams))
    events = [(world.key(), world.new("e")) for _ in range(random.randint(1, 4))]
    more: dict[str, Any] = {"producer": world.new("w")} if random.random() < 0.5 else {}
    rows = [list(event) for event in events]
    op = tape.ask(file, "plain", stream=name, events=rows, **more)
    yield

    def take_effect() -> None:
        world.streams[name].append(world.tick(), None, events)

    if random.random() < 0.9:
        world.later.append(take_effect)
        yield
        tape.told(file, op)
    else:
        tape.told(file, op, "unknown")


def scale(world: World) -> Task:
    """Keys move: to new partitions, or back to fewer."""
    random, tape, file = world.random, world.tape, world.file
    name = random.choice(list(world.streams))
    op = tape.ask(file, "scale", stream=name)
    yield
    numbers = random.sample(range(5), random.randint(1, 4))
    world.streams[name].active = numbers
    yield
    tape.told(file, op)


def ask(world: World) -> Task:
    """The states of some transactions."""
    random, tape, file = world.random, world.tape, world.file
    for txn in random.sample(list(world.txns.values()), min(4, len(world.txns))):
        op = tape.ask(file, "state", txn_id=txn.txn_id)
        yield
        told: dict[str, Any] = {"state": txn.state, "timestamp": txn.timestamp}
        yield
        tape.told(file, op, **told)
