"""From files to a verdict: cut lines, broken lines, exit status, and the recorder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checker import BrokenHistory, judge, judge_entries
from checker.__main__ import main
from checker.recorder import Failed, Recorder, Unknown
from checker.report import EXAMPLES, Report
from tests.checker.table import ONE, commit_two, log_two
from tests.checker.tape import Tape

FOLDER = Path(__file__).parents[2]


def _write(folder: Path, tape: Tape) -> None:
    for file, _, entry in tape.entries:
        with (folder / f"{file}.history").open("a") as lines:
            lines.write(json.dumps(entry) + "\n")


def _good() -> Tape:
    tape = Tape()
    commit_two(tape)
    log_two(tape)
    return tape


def test_a_folder_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0, and all judged things are counted."""
    _write(tmp_path, _good())
    assert main([str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert said["counts"]["transactions committed"] == 2
    assert said["counts"]["events in the log"] == 3


def test_an_anomaly_is_reported_with_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1; kinds, and ``file:line`` of what contradicts what."""
    tape = Tape()
    commit_two(tape)
    tape.log(0)
    _write(tmp_path, tape)
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "lost-write" in said
    assert "p.history:6" in said
    assert main([str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["totals"] == {"lost-write": 2}


def test_examples_are_bounded() -> None:
    """All are counted, some are kept."""
    tape = Tape()
    tape.log(0, *([number, "k", f"e{number}", None] for number in range(99)))
    report = tape.judge()
    assert report.totals == {"unexplained": 99}
    assert len(report.anomalies) == EXAMPLES


def test_the_report_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report's counts, the number of each kind, and some examples of each."""
    tape = _good()
    _write(tmp_path, tape)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in _good().judge().counts), said
    assert "No anomaly." in said
    more = Tape()
    more.log(1, *([number, "k", f"e{number}", None] for number in range(9)))
    more.entries = [("y", line, entry) for _, line, entry in more.entries]
    more.begin("v", "3" * 32, file="z")
    more.write("v", "lost", file="z")
    more.commit("v", "3" * 32, 30, 1, file="z")
    _write(tmp_path, more)
    assert main([str(tmp_path), "--examples", "3"]) == 1
    said = capsys.readouterr().out
    assert "No anomaly." not in said
    rows = [line.strip("│ ").replace(" ", "").split("│") for line in said.splitlines()]
    assert ["unexplained", "9"] in rows
    assert ["lost-write", "1"] in rows
    assert said.count("unexplained: ") == 3
    assert said.count("lost-write: ") == 1


def test_a_kind_has_to_be_known() -> None:
    """A judge can't name one that no reader of the report would see."""
    with pytest.raises(ValueError, match="'odd' is no kind of anomaly"):
        Report().add("odd", "", [])


def test_it_runs_as_a_program(tmp_path: Path) -> None:
    """Exit status 2: the history is broken, or there is none."""
    command = [sys.executable, "-m", "checker", str(tmp_path)]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no file *.history" in done.stderr


def test_a_last_line_that_is_cut_is_passed_over(tmp_path: Path) -> None:
    """Its process was killed: the operation has no answer. The next life goes on behind the last whole line."""
    file = tmp_path / "p.history"
    first = Recorder(file, clock=lambda: 1)
    first.note("begin", txn="t", scope="s")
    first.close()
    whole = file.read_bytes().splitlines(keepends=True)[0]
    file.write_bytes(whole + b'{"at": 1, "op": 0, "ki')
    report = judge(tmp_path)
    assert report.counts["operations without an answer"] == 1
    second = Recorder(file, clock=lambda: 2)
    with second.asking("begin", txn="u", scope="s") as told:
        told["txn_id"] = ONE
    second.close()
    assert judge(tmp_path).counts["operations"] == 2


def test_the_recorder_writes_an_outcome_for_each_call_that_has_one(tmp_path: Path) -> None:
    """`Failed` and `Unknown` tell the outcome; any other exception tells nothing."""
    recorder = Recorder(tmp_path / "p.history")
    recorder.note("begin", txn="t", scope="s")
    for error in (Failed("no"), Unknown("who knows"), ValueError("what")):
        with pytest.raises(type(error)), recorder.asking("commit", txn="t", writers=[]):
            raise error
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "p.history").read_text().splitlines()]
    assert [line["outcome"] for line in lines if line["kind"] == "told"] == [
        "ok",
        "failed",
        "unknown",
        "unknown",
    ]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("nonsense", "p.history:1: no JSON"),
        ("[]", "p.history:1: no JSON object"),
        ('{"at": 1, "op": 1}', "'kind' is missing"),
        ('{"at": 1, "op": 1, "kind": "say"}', "unknown kind"),
        ('{"at": 1, "op": true, "kind": "ask"}', "'op' is bool"),
        ('{"at": 1, "op": 1, "kind": "ask", "what": "guess"}', "unknown what"),
        ('{"at": 1, "op": 1, "kind": "ask", "what": "begin", "txn": "t"}', "'scope' is missing"),
        ('{"at": 1, "op": 1, "kind": "told", "outcome": "ok"}', "was not asked"),
        ('{"at": 1, "op": 1, "kind": "ask", "what": "abort", "txn": "t"}', "nobody began 't'"),
        ('{"at": 1, "op": 1, "kind": "ask", "what": "poll", "reader": "r"}', "nobody opened 'r'"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, lines: str, why: str) -> None:
    """With file and line; nothing is judged."""
    (tmp_path / "p.history").write_text(lines + "\n")
    with pytest.raises(BrokenHistory) as error:
        judge(tmp_path)
    assert why in str(error.value)
    assert str(error.value).startswith("p.history:1: ")
    assert main([str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({4: {"op": 1}}, "operation 1 is asked twice"),
        ({5: {"op": 1}}, "operation 1 was not asked, or told before"),
        ({3: {"at": 0}}, "time goes back"),
        ({3: {"outcome": "maybe"}}, "unknown outcome"),
        ({2: {"events": [["k", "a"], ["k", "a"]]}}, "event 'a' was written before"),
        ({2: {"events": [["k"]]}}, "is not [key or null, id]"),
        ({5: {"timestamp": "late"}}, "'timestamp' is str"),
        ({6: {"txn": "t"}}, "'t' was begun before"),
        ({4: {"series": "x"}}, "series and number go together"),
        ({13: {"events": [[0, "k"]]}}, "has not 4 fields"),
        ({15: {"records": [[1, 2, 3]]}}, "record 0 is not as it should be"),
    ],
)
def test_a_contradiction_in_the_format_is_named(
    changes: dict[int, dict[str, object]], why: str
) -> None:
    """Lines that no recorder may write."""
    entries = _good().entries
    for index, change in changes.items():
        entries[index][2].update(change)
    with pytest.raises(BrokenHistory) as error:
        judge_entries(entries)
    assert why in str(error.value)
