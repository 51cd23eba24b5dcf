"""The settings: the table, what overrides what, what is refused and where, and what is never shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from anabranch.cli import cluster
from anabranch.cli.cluster import child_environment
from anabranch.cli.config import Setting, settings_of
from anabranch.controller import service
from anabranch.controller.config import ControllerOptions
from anabranch.infra.process import SupervisedProcess
from tests.cli.conftest import COMMAND, Run
from tests.cli.fakes import FakeClient

SETTINGS = settings_of(COMMAND)
OF_CONTROLLERS = [each for each in SETTINGS.values() if each.key[0] == "controller"]
HUSH = "hush-hush"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ANABRANCH_"):
            monkeypatch.delenv(name)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ControllerOptions]:
    found: list[ControllerOptions] = []

    def run_controller(options: ControllerOptions) -> int:
        found.append(options)
        return 0

    monkeypatch.setattr(service, "run_controller", run_controller)
    return found


@dataclass
class Place:
    """A configuration file, and the command that shows what it means."""

    path: Path
    run: Run

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o600)

    def rows(self, *arguments: str) -> dict[str, Any]:
        """The settings by name, with the file as option."""
        done = self.run("config", "--json", "--config", str(self.path), *arguments, bootstrap=None)
        assert done.exit_code == 0, done.stderr
        return {each["setting"]: each for each in json.loads(done.stdout)["settings"]}

    def refused(self, text: str) -> str:
        """The error for a file with this text."""
        self.write(text)
        done = self.run("config", "--config", str(self.path), bootstrap=None)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        return done.stderr


@pytest.fixture
def place(run: Run, tmp_path: Path) -> Place:
    return Place(tmp_path / "anabranch.toml", run)


def value_of(setting: Setting, number: int) -> Any:
    """A value that is not the default, and another one for each number."""
    annotation = setting.parameter.type_descriptor.annotation
    if annotation is bool:
        return True
    if annotation in (int, float):
        return annotation(max(setting.parameter.min or 0, 1) + 10 * number)
    return f"/x{number}" if annotation is Path else f"x{number}"


def test_each_variable_has_one_key_and_each_key_one_variable() -> None:
    keys = [each.key for each in SETTINGS.values()]
    assert len(keys) == len(set(keys)) > 40
    for variable, each in SETTINGS.items():
        named = "__".join(each.key).upper()
        assert variable in (f"ANABRANCH_{named}", "ANABRANCH_LEDGER"), each


def test_nothing_that_one_call_does_is_a_setting() -> None:
    for each in SETTINGS.values():
        assert each.option not in ("--yes", "--once", "--keep", "--json", "--broker"), each
    assert not any(each.option == "--plain-readers-lose-history" for each in SETTINGS.values())


@pytest.mark.parametrize("setting", OF_CONTROLLERS, ids=lambda each: each.name)
def test_an_option_overrides_a_variable_and_that_the_file(
    run: Run,
    place: Place,
    started: list[ControllerOptions],
    monkeypatch: pytest.MonkeyPatch,
    setting: Setting,
) -> None:
    """Of each setting of a controller, through the command, up to the options that the controller gets."""
    file, variable, option = (value_of(setting, number) for number in (1, 2, 3))
    place.write(f"[controller]\n{setting.key[1]} = {json.dumps(file)}\n")
    given = [setting.option] if option is True else [setting.option, str(option)]
    words = ("controller", "--config", str(place.path))
    assert run(*words).exit_code == 0
    assert place.rows()[setting.name]["source"] == f"{place.path}, line 2"
    monkeypatch.setenv(setting.variable, str(variable))
    assert run(*words).exit_code == 0
    assert place.rows()[setting.name]["source"] == f"${setting.variable}"
    assert run(*words, *given).exit_code == 0
    found = [getattr(each, setting.parameter.name) for each in started]
    assert list(map(str, found)) == [str(file), str(variable), str(option)]
    shown = place.rows()[setting.name]
    assert (str(shown["value"]), shown["option"]) == (str(variable), setting.option)


def test_a_flag_of_the_file_is_undone_by_a_variable(
    run: Run, place: Place, started: list[ControllerOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("[controller]\nlanes_only = true\n")
    monkeypatch.setenv("ANABRANCH_CONTROLLER__LANES_ONLY", "false")
    run("controller", "--config", str(place.path))
    assert [each.lanes_only for each in started] == [False]


def test_the_cluster_is_that_of_the_file(
    run: Run, fake: FakeClient, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write('bootstrap = "f:1"\nprefix = "p"\nlane = "etl"\n[kafka]\nclient.id = "me"\n')

    def asked(*more: str) -> tuple[Any, ...]:
        assert run("stream", "list", *more, bootstrap=None).exit_code == 0
        assert fake.target is not None
        target = fake.target
        return target.bootstrap, target.prefix, target.lane, dict(target.kafka)

    named = ("--config", str(place.path))
    assert asked(*named) == ("f:1", "p", "etl", {"client.id": "me"})
    more = ("-b", "o:1", "--lane", "own", "-X", "linger.ms=7")
    assert asked(*named, *more) == ("o:1", "p", "own", {"client.id": "me", "linger.ms": "7"})
    monkeypatch.setenv("ANABRANCH_CONFIG", str(place.path))
    assert asked() == ("f:1", "p", "etl", {"client.id": "me"})
    other = place.path.with_name("other.toml")
    other.write_text('bootstrap = "g:1"\n')
    assert asked("--config", str(other))[0] == "g:1", "the option names another file"


def test_no_file_is_looked_for(
    run: Run, fake: FakeClient, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write('bootstrap = "elsewhere:1"\n')
    monkeypatch.chdir(place.path.parent)
    assert run("stream", "list", bootstrap=None).exit_code == 2
    assert "file: none" in run("config", bootstrap=None).stdout


def test_the_options_file_overrides_the_table_of_options(place: Place) -> None:
    options = place.path.with_name("kafka.properties")
    options.write_text("client.id=of-the-file\n")
    place.write(
        f'kafka_file = "{options}"\n[kafka]\nclient.id = "of-the-table"\nlinger.ms = 7\n"client.rack" = "r"\n'
    )
    rows = place.rows("-X", "client.rack=option")
    found = {name: (each["value"], each["source"]) for name, each in rows.items()}
    assert found["kafka.client.id"] == ("of-the-file", str(options))
    assert found["kafka.linger.ms"] == ("7", f"{place.path}, line 4")
    assert found["kafka.client.rack"] == ("option", "option --kafka")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('\nlanee = "x"\n', "line 2: lanee is unknown: did you mean lane?"),
        ("[controler]\n", "line 1: controler is unknown: did you mean controller?"),
        ('[controller]\ndata-dir = "x"\n', "line 2: controller.data-dir is unknown: did you mean data_dir?"),
        ('[web]\nzzz = "x"\n', "line 2: web.zzz is unknown: there are allow_actions, codec, host,"),
        ('[controller]\nmax_open = "7"\n', "line 2: controller.max_open must be a whole number"),
        ("[controller]\nmax_open = 7.5\n", "line 2: controller.max_open must be a whole number"),
        ("[controller]\n\nmax_open = 0\n", "line 3: controller.max_open is wrong: "),
        ("[controller]\nhttp = 8000\n", "line 2: controller.http must be a text"),
        ("[web]\nport = true\n", "line 2: web.port must be a whole number"),
        ('[web]\nallow_actions = "yes"\n', "line 2: web.allow_actions must be true or false"),
        ('[web]\nhost_name = "a"\n', "line 2: web.host_name must be a list of texts"),
        ("[web]\nhost_name = [1]\n", "line 2: web.host_name must be a list of texts"),
        ("bootstrap = 3\n", "line 1: bootstrap must be a text"),
        ('kafka = "x"\n', "line 1: kafka must be a table: [kafka]"),
        ('log_format = "xml"\n', "line 1: log_format is wrong: "),
        ('[kafka]\nsasl.pasword = "x"\n', "line 2: sasl.pasword is not known"),
        ('[kafka]\nsasl.pasword = "x"\n', "did you mean sasl.password?"),
        ('[kafka]\nacks = "0"\n', "line 2: acks='0' is refused"),
        ("[kafka]\nclient.id = [1]\n", "line 2: kafka.client.id must be a text, a number, true or false"),
        ('[kafka]\nsasl.password_file = "/none"\n', "line 2: kafka.sasl.password_file: /none can't be read"),
        ('[ledger]\ndatabase_file = "/none"\n', "line 2: ledger.database_file: /none can't be read"),
        ("bootstrap = \n", "is no TOML: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_place(place: Place, text: str, said: str) -> None:
    error = place.refused(text)
    assert said in error
    assert str(place.path) in error


def test_a_file_that_is_missing_is_refused_by_all_commands(run: Run, fake: FakeClient) -> None:
    done = run("stream", "list", "--config", "/no/such.toml")
    assert (done.exit_code, fake.calls) == (2, [])
    assert "/no/such.toml can't be read" in done.stderr
    assert run("stream", "list", "--config", "/no/such.toml", "--help").exit_code == 0


def test_secrets_are_never_shown(
    run: Run, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{HUSH}\n")
    names = ("sasl.password", "ssl.key.password", "sasl.oauthbearer.client.secret")
    lines = [f'{name} = "{HUSH}"' for name in names[1:]]
    place.write(
        "\n".join(["[kafka]", f'{names[0]}_file = "{file}"', *lines])
        + f'\n[ledger]\ndatabase = "postgresql://me:{HUSH}@host/db"\n'
    )
    for more in ((), ("--json",), ("-X", f"sasl.oauthbearer.config={HUSH}")):
        done = run("config", "--config", str(place.path), *more, bootstrap=None)
        assert done.exit_code == 0
        assert HUSH not in done.output
    rows = place.rows()
    assert all(rows[f"kafka.{name}"]["secret"] for name in names)
    assert rows["kafka.sasl.password"]["source"] == f"{place.path}, line 2"
    assert rows["ledger.database"]["source"] == f"{place.path}, line 6"
    assert "(set)" in run("config", "--config", str(place.path), bootstrap=None).stdout
    monkeypatch.setenv("ANABRANCH_LEDGER_FILE", str(file))
    assert place.rows()["ledger.database"]["source"] == "$ANABRANCH_LEDGER_FILE"
    monkeypatch.setenv("ANABRANCH_LEDGER", "x.db")
    assert place.rows()["ledger.database"]["source"] == "$ANABRANCH_LEDGER"
    both = f'[ledger]\ndatabase = "{HUSH}"\ndatabase_file = "{file}"\n'
    assert HUSH not in (error := place.refused(both))
    assert "ledger.database is given twice" in error


def test_the_path_of_a_file_with_secrets_is_no_secret(place: Place) -> None:
    place.write('[web]\npassword_file = "/run/users"\n')
    row = place.rows()["web.password_file"]
    assert (row["value"], row["secret"]) == ("/run/users", False)
    error = place.refused('[web]\npassword_file_file = "/run/users"\n')
    assert "password_file_file" in error
    assert "password_file" in error


def test_a_secret_of_a_file_gets_to_its_place(
    run: Run, fake: FakeClient, place: Place, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text(" with blanks \r\n")
    place.write(f'[kafka]\nsasl.password_file = "{file}"\n')
    assert run("stream", "list", "--config", str(place.path)).exit_code == 0
    assert fake.target is not None
    assert fake.target.kafka == {"sasl.password": " with blanks "}
    assert "with blanks" not in repr(fake.target)


def test_a_file_with_secrets_that_all_may_read_is_warned_of(place: Place, run: Run) -> None:
    place.write('[web]\npassword_file = "/run/users"\n')
    place.path.chmod(0o604)
    assert run("config", "--config", str(place.path)).stderr == ""
    for text in ('[kafka]\nsasl.password = "x"\n', '[ledger]\ndatabase = "x"\n'):
        place.write(text)
        assert run("config", "--config", str(place.path)).stderr == ""
        place.path.chmod(0o604)
        shown = run("config", "--config", str(place.path)).stderr
        assert f"warning: all users of this machine can read the secrets in {place.path}" in shown


def test_a_variable_that_is_misspelt_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_BOOTSTRP", "b:1")
    monkeypatch.setenv("ANABRANCH_WEB_SERVICE_HOST", "10.0.0.1")  # as Kubernetes sets it
    found = json.loads(run("config", "--json", bootstrap=None).stdout)["not_read"]
    assert found == {"ANABRANCH_BOOTSTRP": "ANABRANCH_BOOTSTRAP"}
    assert "ANABRANCH_BOOTSTRP is not read" in run("config", bootstrap=None).stdout


def test_a_child_controller_has_only_the_options_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ANABRANCH_CONFIG", "ANABRANCH_CONTROLLER__HTTP", "ANABRANCH_KAFKA_FILE"):
        monkeypatch.setenv(name, "/x")
    found: list[Any] = []
    monkeypatch.setattr(SupervisedProcess, "start", lambda *_, **more: found.append(more))
    cluster.ControllerProcess.inside(tmp_path, "c", "b:1", 3.0).start()
    assert not any(name.startswith("ANABRANCH_") for name in found[0]["environment"])


@pytest.mark.parametrize(
    "by", [*(pytest.param(by, marks=pytest.mark.long) for by in ("option", "variable")), "file"]
)
def test_every_line_is_json_however_the_format_is_given(tmp_path: Path, by: str) -> None:
    """Without a broker: an error of the parser, a note, and the error that ends the command."""
    file = tmp_path / "anabranch.toml"
    file.write_text('log_format = "json"\n[kafka]\nsasl.password = "x"\n')
    file.chmod(0o604)
    more = ["--log-format=json"] if by == "option" else []
    more += ["--config", str(file)] if by == "file" else []
    environment = child_environment({"ANABRANCH_LOG_FORMAT": "json"} if by == "variable" else {})
    for words in (["read", "a/b", "--nope"], ["web", "--port", "0", "-b", "127.0.0.1:1", "-v"]):
        done = subprocess.run(
            [sys.executable, "-m", "anabranch.cli", *words, *more],
            capture_output=True, text=True, env=environment, timeout=60,
        )  # fmt: skip
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        assert lines[-1]["fields"]["error"]["exit_code"] == done.returncode > 0
        assert all(line["time"].endswith("Z") and line["level"] for line in lines)
        assert (by == "file") == any("can read the secrets" in one["message"] for one in lines)
        if "-v" in words:
            assert any("Traceback" in line.get("exception", "") for line in lines)


def test_the_kit_plays_on_no_cluster_that_only_a_variable_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANABRANCH_BOOTSTRAP", "b:9092")
    kit = COMMAND.commands["conformance"]
    assert kit.make_context("conformance", []).params["bootstrap"] is None
    given = kit.make_context("conformance", ["--bootstrap", "c:9092"])
    assert given.params["bootstrap"] == "c:9092"
