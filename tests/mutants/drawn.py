"""Mutations drawn at random: does any quick test notice that one operator, constant or statement changed?

Planted bugs (`catalogue.py`) break the rules of the design. These break lines drawn by chance, so they show what no
test holds. They guard deletions of tests: the same mutations run before and after, and as many have to be found.

```
python -m tests.mutants.drawn map --out map.json                     # which tests run which lines, and for how long
python -m tests.mutants.drawn run --map map.json --out found.json    # 300 mutations; exits 0, and prints a summary
```

A mutation is found if one of the tests that run its line fails, or if they take longer than `PATIENCE_S`. Tests run
from the quickest to the slowest, until `SECONDS` are over. Lines that no test runs are not drawn; `map` prints the
share of branches that tests take, by folder.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MUTATED = ("core", "controller", "client", "tables")
TESTS = ("core", "controller", "client", "tables", "reading", "memory", "processing", "ledger")
SECONDS = 40.0  # of tests for a mutation, as they took in `map`
PATIENCE_S = 100.0

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One change of one file: the text from `start` to `end` (offsets of characters) becomes `text`."""

    file: str
    line: int
    start: int
    end: int
    kind: str
    text: str


# -- drawing -------------------------------------------------------------------------------------


def mutations(file: str, source: str) -> Iterator[Mutation]:
    """All mutations of a file: of what is inside functions, but neither of annotations nor of texts."""
    starts = [0]
    for text in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def make(node: ast.expr | ast.stmt, kind: str, text: str) -> Mutation:
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return Mutation(
            file, node.lineno, starts[node.lineno - 1] + node.col_offset, end, kind, text
        )

    for outer in ast.walk(ast.parse(source)):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in outer.body:
                for node in _code(statement):
                    yield from (make(node, kind, text) for kind, text in _changes(node))


def _code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """A statement's nodes, without functions inside (they come by themselves), annotations and f-strings."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for field, value in ast.iter_fields(node):
        if field != "annotation":
            for each in value if isinstance(value, list) else (value,):
                if isinstance(each, ast.AST):
                    yield from _code(each)


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """(what is changed, the new text) of one node."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPS:
            swapped: Any = SWAPS[type(op)]()
            yield "comparison", f"({ast.unparse(ast.Compare(left, [swapped], [right]))})"
        case ast.BoolOp(op=op, values=values):
            swapped = SWAPS[type(op)]()
            yield "and, or", f"({ast.unparse(ast.BoolOp(swapped, values))})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            if not any(
                isinstance(side, ast.Constant | ast.JoinedStr) and not _is_number(side)
                for side in (left, right)
            ):
                swapped = SWAPS[type(op)]()
                yield "arithmetic", f"({ast.unparse(ast.BinOp(left, swapped, right))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", str(value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "statement", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", "pass"


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def draw(count: int, seed: int, run: dict[str, dict[str, list[str]]]) -> list[Mutation]:
    """`count` mutations of lines that a test runs, each as likely as any other."""
    found = [
        mutation
        for file in sorted(run)
        for mutation in mutations(file, (ROOT / file).read_text())
        if str(mutation.line) in run[file]
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


# -- which test runs which line ------------------------------------------------------------------


class _Recorder:
    """A plugin of pytest: a context of coverage for each test function, and the seconds that it takes."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()  # of no use: under coverage, times are longer

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._measured.switch_context(nodeid.partition("[")[0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0]
        self.seconds[test] += report.duration
        if report.failed:
            self.failed.add(test)


def record(out: Path) -> int:
    """Run the quick tests once under coverage; write lines -> tests, tests -> seconds, and the branches' shares."""
    folders = [f"{ROOT}/anabranch/{name}" for name in MUTATED]
    measured = coverage.Coverage(data_file=None, branch=True, source=folders, config_file=False)
    recorder = _Recorder(measured)
    measured.start()
    status = pytest.main(["-q", "-p", "no:cacheprovider", *_folders()], plugins=[recorder])
    measured.stop()
    data = measured.get_data()
    lines = {}
    for name in sorted(data.measured_files()):
        of = data.contexts_by_lineno(name)
        tests = {str(line): sorted({*names} - {""} - recorder.failed) for line, names in of.items()}
        lines[str(Path(name).relative_to(ROOT))] = {line: t for line, t in tests.items() if t}
    shares = {name: _share(measured, f"{ROOT}/anabranch/{name}/*") for name in MUTATED}
    out.write_text(json.dumps({"lines": lines, "seconds": recorder.seconds, "branches": shares}))
    print("branch coverage:", ", ".join(f"{name} {share:.1f} %" for name, share in shares.items()))
    return int(status)


def _folders() -> list[str]:
    return [f"tests/{name}" for name in TESTS if (ROOT / "tests" / name).exists()]


def _share(measured: coverage.Coverage, files: str) -> float:
    with open(os.devnull, "w") as nowhere:
        return measured.report(include=[files], file=nowhere)


# -- running -------------------------------------------------------------------------------------


def judge(mutation: Mutation, tests: list[str], at: Path) -> str:
    """`found`, `missed` or `found by time`, in the copy of the tree at `at`, which is as before afterwards."""
    path = at / mutation.file
    before = path.read_bytes()
    path.write_bytes(before[: mutation.start] + mutation.text.encode() + before[mutation.end :])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {
        "PYTHONPATH": str(at),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        ran = subprocess.run(
            command, cwd=at, env=environment, capture_output=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "found by time"
    finally:
        path.write_bytes(before)
    return "missed" if ran.returncode == 0 else "found"


def run(known: dict[str, Any], drawn: list[Mutation], out: Path, at_once: int) -> None:
    """Judge all; write them with their results, and print a summary."""
    copies = [Path(tempfile.mkdtemp(prefix="drawn-")) for _ in range(at_once)]
    for copy in copies:
        for name in ("anabranch", "tests", "checker", "examples", "bench", "pyproject.toml"):
            source, target = ROOT / name, copy / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
    free = list(copies)

    def one(mutation: Mutation) -> dict[str, Any]:
        tests: list[str] = []
        left = SECONDS
        of_line = known["lines"][mutation.file][str(mutation.line)]
        for test in sorted(of_line, key=lambda name: known["seconds"].get(name, 0.0)):
            left -= known["seconds"].get(test, 0.0)
            if tests and left < 0:
                break
            tests.append(test)
        at = free.pop()
        started = time.monotonic()
        try:
            result = judge(mutation, tests, at)
        finally:
            free.append(at)
        print(
            f"{result:13} {time.monotonic() - started:5.1f} s  {mutation.file}:{mutation.line} {mutation.kind}",
            flush=True,
        )
        return asdict(mutation) | {"result": result, "tests": len(tests)}

    try:
        with ThreadPoolExecutor(at_once) as pool:
            results = list(pool.map(one, drawn))
    finally:
        for copy in copies:
            shutil.rmtree(copy)
    out.write_text(json.dumps(results, indent=1))
    print(f"{sum(r['result'] != 'missed' for r in results)} of {len(results)} found")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.drawn", description=__doc__.splitlines()[0]
    )
    parser.add_argument("what", choices=("map", "run"))
    parser.add_argument("--map", type=Path, default=Path("map.json"), help="what `map` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--again", type=Path, help="the mutations of this result of `run`, in place of a draw"
    )
    parser.add_argument("--at-once", type=int, default=2)
    given = parser.parse_args()
    if given.what == "map":
        return record(given.out)
    known = json.loads(given.map.read_text())
    if given.again:
        names = Mutation.__dataclass_fields__
        drawn = [
            Mutation(**{name: row[name] for name in names})
            for row in json.loads(given.again.read_text())
        ]
    else:
        drawn = draw(given.count, given.seed, known["lines"])
    run(known, drawn, given.out, given.at_once)
    return 0


if __name__ == "__main__":
    sys.exit(main())
