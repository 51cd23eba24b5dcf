"""More than the tests do: ``python -m tests.checker SEEDS``, ``--lies FOLDER…`` and ``--events N…``.

The first judges correct histories and ones with a lie, and prints what was judged wrongly; the second plants lies
in recorded histories; the third tells how long big histories of so many events take, each in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import resource
import time
from collections import Counter
from multiprocessing import Process
from pathlib import Path
from random import Random

from checker import judge_entries
from checker.reading import read_folder
from tests.checker.corruptions import LIES, History
from tests.checker.serial import generate
from tests.checker.tape import Tape, row


def hunt(first: int, count: int) -> None:
    """Correct histories and lies."""
    told: Counter[str] = Counter()
    wrong = 0
    for seed in range(first, first + count):
        entries = generate(seed)
        for correct in (generate(seed, is_ragged=True), copy.deepcopy(entries)):
            report = judge_entries(correct)
            if not report.ok:
                wrong += 1
                print(f"seed {seed}: a false alarm: {report.anomalies[0]}")
        for name, (lie, kinds) in LIES.items():
            changed = copy.deepcopy(entries)
            if lie(History(changed, Random(seed))):
                told[name] += 1
                report = judge_entries(changed)
                if not report.kinds & kinds:
                    wrong += 1
                    print(f"seed {seed}: {name} was not found, but {report.kinds}")
    print(f"{count} histories, {sum(told.values())} lies, {wrong} judged wrongly")
    print(", ".join(f"{name} {number}" for name, number in told.most_common()))


def lie_in(folders: list[Path], tries: int = 3) -> None:
    """Lies in recorded histories: a lie that is not found is a blind spot, of the checker or the recorder."""
    told: Counter[str] = Counter()
    for folder in folders:
        entries = list(read_folder(folder))
        report = judge_entries(copy.deepcopy(entries))
        if not report.ok:
            print(f"{folder}: not correct as it is: {report.anomalies[0]}")
            continue
        for name, (lie, kinds) in LIES.items():
            for number in range(tries):
                changed = copy.deepcopy(entries)
                if not lie(History(changed, Random(number))):
                    break
                told[name] += 1
                report = judge_entries(changed)
                if not report.kinds & kinds:
                    print(f"{folder}: {name} was not found, but {report.kinds}")
    print(", ".join(f"{name} {number}" for name, number in told.most_common()))
    print("never told:", ", ".join(name for name in LIES if not told[name]) or "none")


def measure(events: int) -> None:
    """A history of transactions of ten events, each read by three readers and at the end."""
    entries = _big(events).entries
    before = _peak_mib()
    begun = time.process_time()
    report = judge_entries(entries)
    took = time.process_time() - begun
    seen = report.counts["events seen"]
    print(
        f"{events:,} events in the log, {seen:,} seen, {len(entries):,} lines: {took:.1f} s of "
        f"processor time, {took / events * 1e6:.1f} us an event; {before:,.0f} MiB with the lines, "
        f"{_peak_mib():,.0f} at the peak; ok: {report.ok}"
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _big(events: int) -> Tape:
    tape = Tape()
    modes = ("raw", "ordered", "transactions")
    for mode in modes:
        tape.open(mode, mode)
    log: dict[int, list[list[object]]] = {0: [], 1: []}
    records: list[list[object]] = []
    for number in range(events // 10):
        partition, txn, txn_id = number % 2, f"t{number}", f"{number + 1:032x}"
        file, key = f"p{number % 7}", f"k{number % 1000}"
        names = [f"{txn}/{i}" for i in range(10)]
        tape.begin(txn, txn_id, file)
        tape.write(txn, *names, key=key, file=file)
        tape.commit(txn, txn_id, number + 1, 10, file)
        first = len(log[partition])
        rows = [
            row(name, first + i, txn_id, number + 1, partition, key) for i, name in enumerate(names)
        ]
        log[partition] += [[first + i, key, name, txn_id] for i, name in enumerate(names)]
        records.append([number, number + 1, [txn_id], [[partition, first, first + 10]]])
        for mode in modes:
            tape.poll(mode, *rows)
    for mode in modes:
        tape.do("r", "caught_up", reader=mode)
    for partition, rows_of in log.items():
        tape.log(partition, *rows_of, end=events)
    tape.commits(*records)
    return tape


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--events", type=int, nargs="+", metavar="N")
    parser.add_argument("--lies", type=Path, nargs="+", metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.lies:
        lie_in(arguments.lies)
    elif arguments.events:
        for number in arguments.events:
            child = Process(target=measure, args=(number,))
            child.start()
            child.join()
    else:
        hunt(arguments.first, arguments.seeds)
