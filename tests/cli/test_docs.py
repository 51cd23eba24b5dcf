"""docs/cli.md says what `--help` says, no page names a command that there is not, and the site builds."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections import Counter

import pytest

from anabranch import Client
from anabranch.cli.errors import EXIT_CODES, ExitCode
from anabranch.controller.metrics import TABLE as OF_LEADERS
from anabranch.controller.monitor import Table
from anabranch.ledger.watch import TABLE as OF_LEDGERS
from anabranch.processing.app import Processor
from anabranch.processing.metrics import TABLE as OF_WORKERS
from tests.cli.conftest import Run
from tests.cli.reference import PAGE, SETTINGS, commands, described, renewed, with_settings
from tests.pages import ROOT
from tests.rights import page as rights_page

TEXT = PAGE.read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    *(p for p in PAGE.parent.rglob("*.md") if p.parent.name != "decisions"),
]
# In a text as `anabranch …`, or as a line of a block.
_CALL = re.compile(r"`anabranch ([^`]+)`|^ *(?:\$ )?anabranch ((?:[^\n\\]|\\\n|\\)+)", re.MULTILINE)


def test_every_command_has_its_section() -> None:
    assert described(TEXT) == set(commands())
    for name in commands():
        assert f"`anabranch {name}`" in TEXT


def test_its_tables_are_those_of_the_commands() -> None:
    assert renewed(TEXT) == TEXT, "run `python -m tests.cli.reference`"


def test_the_table_of_settings_is_that_of_the_options() -> None:
    text = SETTINGS.read_text(encoding="utf-8")
    assert with_settings(text) == text, "run `python -m tests.cli.reference`"
    assert text.count("| `ANABRANCH_") >= 40


def strangers(text: str) -> list[str]:
    """The calls of a text whose command, or one of whose options, there is not."""
    wrong = []
    known = commands()
    groups = {name.rpartition(" ")[0] for name in known} | {""}
    for call in ("".join(found) for found in _CALL.findall(text)):
        words = re.split(r"[\s|;]+", call.partition("#")[0])
        name = ""
        while name in groups and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
            name = f"{name} {words.pop(0)}".strip()
        if name in known:
            there = {"--help"}.union(*(p.opts + p.secondary_opts for p in known[name].params))
            options = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
            wrong += [f"{call}: {option}" for option in options - there]
        elif name not in groups:
            wrong.append(call)
    return wrong


def test_pages_name_commands_and_options_that_there_are() -> None:
    found = {page.name: strangers(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_a_stranger_is_found() -> None:
    assert strangers("`anabranch audit`, `anabranch txn list --old`, `anabranch txn …`") == [
        "audit", "txn list --old: --old",
    ]  # fmt: skip
    assert strangers("    $ anabranch stream creat a/b\n") == ["stream creat a/b"]


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md", "docs/how-to/deploy.md"])
def test_pip_is_asked_for_extras_that_there_are(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = re.findall(
        r"pip install '?(?:anabranch|\.)(?:\[([\w,]+)\])?", (ROOT / name).read_text()
    )
    assert asked
    wanted = {extra for extras in asked for extra in extras.split(",") if extra}
    assert wanted <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
    ("where", "table"), [("leaders", OF_LEADERS), ("workers", OF_WORKERS), ("ledgers", OF_LEDGERS)]
)
def test_operations_lists_the_metrics(where: str, table: Table) -> None:
    page = (PAGE.parent / "operations.md").read_text(encoding="utf-8")
    mark = f"<!-- metrics of {where} -->\n"
    listed = page.partition(mark)[2].partition("<!-- end -->")[0].splitlines()
    for name, number in table.numbers.items():
        suffix = "_total" if number.kind == "counter" else ""
        labels = ", ".join(number.labels)
        row = f"| `anabranch_{name}{suffix}` | {number.kind} | {labels} | {number.help} |"
        assert row in listed
    assert f"| `anabranch_{table.timed[0]}` | histogram |  | {table.timed[1]} |" in listed
    assert len(listed) == len(table.numbers) + 3, "a head of two lines, and the histogram"


def test_the_reference_has_each_call_of_the_client_once() -> None:
    pages = [path.read_text() for path in sorted((PAGE.parent / "reference").glob("*.md"))]
    listed = Counter(re.findall(r"^::: anabranch\.Client\.(\w+)$", "\n".join(pages), re.M))
    for members in re.findall(
        r"^::: anabranch\.Client\n.*\n +members: \[(.*)\]", "\n".join(pages), re.M
    ):
        listed.update(members.split(", "))
    hidden = {"heart", "reader_ports", "check_outputs"}  # as in mkdocs.yml
    calls = {name for name in vars(Client) if not name.startswith("_")} - hidden
    assert listed == Counter(calls), "docs/reference/*.md, one page for each topic"


def test_processing_lists_the_arguments_of_a_processor() -> None:
    text = PAGE.with_name("processing.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.+?)`)? ?\|", text, re.M)
    given = inspect.signature(Processor).parameters.values()
    assert rows == [(p.name, "" if p.default is p.empty else repr(p.default)) for p in given]


def test_every_exit_code_has_a_meaning() -> None:
    assert set(EXIT_CODES) == set(ExitCode)


def test_every_command_has_help_for_every_option() -> None:
    for name, command in commands().items():
        assert command.help, name
        assert not re.search(r"\S\n(?!- )\S", command.help), (
            f"{name}: a line that ends inside of a paragraph"
        )
        for parameter in command.params:
            assert parameter.help, f"{name}: {parameter.name}"


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"[\w\"./\[\]]+", text))


@pytest.mark.long
def test_a_help_shows_every_option_and_takes_no_text_for_markup(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    monkeypatch.setenv("COLUMNS", "400")
    for name, command in commands().items():
        result = run(*name.split(), "--help")
        assert result.exit_code == 0, name
        shown = words(result.stdout)
        for parameter in command.params:
            assert not words(parameter.help) - shown, f"{name}: {parameter.name}"
            if parameter.param_type_name == "option":
                assert max(parameter.opts, key=len) in result.stdout, name
        assert not words(command.help) - shown, name


def test_every_command_can_show_tracebacks() -> None:
    for name, command in commands().items():
        options = {opt for parameter in command.params for opt in parameter.opts}
        assert {"-v", "--verbose"} <= options, name
        assert "--json" in options or name == "controller", "a service that writes logs"


def test_the_help_shows_the_exit_codes(run: Run) -> None:
    text = " ".join(run("--help").stdout.split())
    for code, (meaning, _) in EXIT_CODES.items():
        assert f"{int(code)} {meaning}" in text


def test_the_security_page_has_the_table_of_rights() -> None:
    page = rights_page.PAGE.read_text()
    assert len(rights_page.PART.findall(page)) == 2
    assert page == rights_page.renewed(page), "python -m tests.rights.page writes it"


def test_no_right_is_listed_twice() -> None:
    every = [(role, right[:3]) for role, found in rights_page.ROLES.items() for right in found]
    assert len(every) == len(set(every))
