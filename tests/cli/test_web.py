"""The options of `anabranch web`: when it refuses to start; and lines of password files."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.datastructures import Headers

from anabranch.web.login import PasswordLogin, password_line
from tests.cli.conftest import COMMAND, Run

REFUSED = {
    "values for all": ["--host", "0.0.0.0", "--show-values"],
    "values for all, at a name like an address": ["--host", "127.example.com", "--show-values"],
    "values by a proxy, for all": ["--host-name", "console.example.com", "--show-values"],
    "two logins": ["--user-header", "X-User", "--password-file", "{file}"],
    "a proxy without a header": ["--proxy", "10.0.0.1"],
    "a codec without a pattern": ["--codec", "json"],
    "a codec that is none": ["--codec", "*=str,nope:x"],
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_it_refuses_to_start(run: Run, tmp_path: Path, options: list[str]) -> None:
    """Before it listens, or looks for a broker."""
    file = tmp_path / "users"
    file.write_text(password_line("anna", "x"))
    given = [each.format(file=file) for each in options]
    result = run("web", "--port", "0", *given)
    assert result.exit_code == 2, result.output
    assert "InvalidArgument: " in result.stderr
    assert "can't listen" not in result.stderr


def test_a_line_of_a_password_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(COMMAND, ["web-password", "anna"], input="right\n")
    assert result.exit_code == 0
    (tmp_path / "users").write_text(result.stdout)
    found = PasswordLogin(tmp_path / "users")
    header = base64.b64encode(b"anna:right").decode()
    assert found.user_of("", Headers({"authorization": f"Basic {header}"})) == "anna"
    for user, typed in (("an:na", "x\n"), ("anna", "\n"), ("anna", "")):
        refused = CliRunner().invoke(COMMAND, ["web-password", user], input=typed)
        assert refused.exit_code == 2
