"""The tree of commands, and how their errors become exit codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from anabranch import logs
from anabranch.cli import (
    config,
    controller,
    data,
    doctor,
    group,
    lane,
    ledger,
    local,
    processor,
    spark,
    stream,
    table,
    txn,
)
from anabranch.cli.errors import (
    EXIT_CODES,
    ExitCode,
    Failure,
    OutputClosed,
    Terminated,
    failure_of,
)
from anabranch.cli.options import App, option
from anabranch.cli.output import (
    print_line,
    print_note,
    show_failure,
    show_traceback,
    take_any_text,
)
from anabranch.librdkafka.configuration import LOG_FORMAT, config_file

_COMPLETING = "_ANABRANCH_COMPLETE"  # the shell's variable


class Commands(TyperGroup):
    """The root group. Errors become one line and an exit code, with a traceback only for -v."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit."""
        given = list(sys.argv[1:] if args is None else args)
        if sys.stdout is None:  # closed by the shell
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the process's own
        take_any_text()
        level = logging.INFO if {"-v", "--verbose"} & set(given) else logging.WARNING
        try:
            with _sigterm_raises():
                if not {"-h", "--help"} & set(given) and _COMPLETING not in os.environ:
                    extra |= self._configured(given, level)
                if level == logging.INFO:
                    logs.start("text", level, logging.BASIC_FORMAT)
                code = super().main(
                    given, prog_name or "anabranch", complete_var, False, False, **extra
                )
        except BaseException as error:  # noqa: BLE001 - this is where all of them end
            sys.exit(_end(error, given))
        sys.exit(code if isinstance(code, int) else ExitCode.OK)

    def _configured(self, given: Sequence[str], level: int) -> dict[str, Any]:
        """The settings of the configuration file, for the parser. Begins the log, if it is JSON.

        Raises: InvalidArgument, for what is wrong in the file.
        """
        if "config" not in self.commands:
            return {}  # a program with options of its own
        names = {each.name for each in config.named_command(self, given).params}
        form = config.word_after(given, "--log-format") or os.environ.get(LOG_FORMAT.variable)
        form = "json" if "--log-json" in given else form
        if form == "json" and "log_format" in names:
            logs.start(form, level)
        file = config_file(config.word_after(given, "--config") if "config" in names else None)
        loaded = config.load(self, file)
        form = form or loaded.values.get(LOG_FORMAT.variable)
        if form == "json" and "log_format" in names:
            logs.start(form, level)
        if file is not None and file.warning:
            print_note(f"warning: {file.warning}")
        return {"default_map": loaded.defaults(self), "obj": loaded}


def _end(error: BaseException, given: Sequence[str]) -> int:
    """Show an error. Returns the exit code."""
    as_json = "--json" in given
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitCode.DIFFERENCE
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, OutputClosed):
        # Closing standard output at exit must not raise again.
        sys.stdout = None
        return ExitCode.OK
    if isinstance(error, typer.TyperException):
        return _end_usage(error, as_json=as_json)
    if isinstance(error, typer.Abort):
        error = KeyboardInterrupt()
    failure = failure_of(error)
    if failure.code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        return failure.code
    if {"-v", "--verbose"} & set(given):
        show_traceback(error)
    show_failure(failure, as_json=as_json)
    return failure.code


def _end_usage(error: typer.TyperException, *, as_json: bool) -> int:
    """Show why the parser refuses a call. Returns the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        # The first part of the help is shown already.
        for line in error.format_message().strip().splitlines():
            print_note(line)
        return ExitCode.USAGE
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if context is not None and not as_json:
        message = f"{message.rstrip('.')} (see `{context.command_path} --help`)"
    show_failure(Failure("Usage", message, ExitCode.USAGE), as_json=as_json)
    return ExitCode.USAGE


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, so that all that was started is stopped, as with Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_terminated(_signal: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _epilog() -> str:
    codes = [f"{int(code)} {meaning}" for code, (meaning, _) in EXIT_CODES.items()]
    return "Exit codes: " + "; ".join(codes) + "."


app = App(
    name="anabranch",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Transactions for Kafka-compatible logs.",
    epilog=_epilog(),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print_line(f"anabranch {version('anabranch')}")
        except PackageNotFoundError:
            print_line("anabranch (not installed)")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, option("--version", "Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Transactions for Kafka-compatible logs."""


_DATA = "Commands for data"
_OPERATORS = "Commands for operators"
_SERVICES = "Commands that run services"
_GROUPS: tuple[tuple[str, typer.Typer, str], ...] = (
    ("stream", stream.app, _DATA),
    ("table", table.app, _DATA),
    ("txn", txn.app, _DATA),
    ("series", txn.series_app, _DATA),
    ("group", group.app, _DATA),
    ("processor", processor.app, _DATA),
    ("ledger", ledger.app, _DATA),
    ("spark", spark.app, _DATA),
    ("lane", lane.app, _OPERATORS),
    ("grants", lane.grants_app, _OPERATORS),
    ("command", lane.commands_app, _OPERATORS),
    ("cluster", lane.cluster_app, _OPERATORS),
)
_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    ("read", data.read, _DATA),
    ("write", data.write, _DATA),
    ("load", data.load, _DATA),
    ("doctor", doctor.command, _OPERATORS),
    ("config", config.command, _OPERATORS),
    ("apply", stream.apply, _OPERATORS),
    ("audit-log", lane.audit_log, _OPERATORS),
    ("conformance", local.conformance, _SERVICES),
    ("dev", local.dev, _SERVICES),
    ("broker", local.broker, _SERVICES),
    ("controller", controller.command, _SERVICES),
    ("warm", controller.warm, _SERVICES),
    ("web", local.web, _SERVICES),
    ("web-password", local.web_password, _SERVICES),
    ("bridge", processor.bridge, _SERVICES),
)
for _name, _group, _panel in _GROUPS:
    app.add_typer(_group, name=_name, rich_help_panel=_panel)
for _name, _command, _panel in _COMMANDS:
    app.command(_name, rich_help_panel=_panel)(_command)
