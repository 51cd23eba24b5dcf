"""The settings: options that environment variables and the configuration file give, too; and `anabranch config`.

A setting is declared once, as an option of a command. `settings_of` makes the table of all settings from these
declarations: the key in the file, the variable, the option, the type and the default. The command line itself then
prefers an option to a variable, a variable to the file, and the file to the default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from anabranch.cli.options import (
    ConnectionOptions,
    Json,
    LogFormat,
    Verbose,
    layers_of,
)
from anabranch.cli.output import Column, Grid, print_result
from anabranch.errors import InvalidArgument
from anabranch.librdkafka.configuration import (
    CONFIG_VARIABLE,
    KAFKA,
    KEYS,
    SERVICES,
    ConfigFile,
    is_secret,
    secret_of,
)

# The tables of services, and the commands that read them. The first one's options are the settings.
_COMMANDS = {
    "controller": ("controller", "doctor"),
    "web": ("web",),
    "processor": ("processor run",),
    "ledger": ("ledger recover", "ledger create", "ledger adopt", "ledger list"),
}
assert tuple(_COMMANDS) == SERVICES  # noqa: S101
# Options of one call, which nothing else should decide; and --kafka, whose table has its own rules.
_OF_A_CALL = frozenset(
    ("broker", "config", "json", "kafka", "keep", "log_json", "once", "skip_commands", "verbose")
)
_FILE = "_file"
# Variables of the embedded broker and its downloads, which have no option.
_OTHERS = ("ANABRANCH_CACHE", "ANABRANCH_KAFKA_LOCK", "ANABRANCH_MAVEN_REPOSITORY")
# By the type of an option: the types that a value in the file may have, and their name. Others are texts.
_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
}
_TEXT = ((str,), "a text")
_NONE = TyperCommand("none")  # values are checked outside of any command


@dataclass(frozen=True)
class Setting:
    """A row of the table. ``key``: in the file. ``parameter``: the option's declaration."""

    key: tuple[str, ...]
    variable: str
    option: str
    parameter: Any = field(repr=False)

    @property
    def name(self) -> str:
        """The key, as people write it."""
        return ".".join(self.key)

    @property
    def is_secret(self) -> bool:
        """Whether the value must not be shown."""
        return is_secret(self.name)

    def checked(self, value: Any, file: ConfigFile) -> Any:
        """A value of the file. Raises: InvalidArgument."""
        annotation = self.parameter.type_descriptor.annotation
        types, what = _TYPES.get(annotation, _TEXT)
        if self.parameter.multiple:
            what = "a list of texts"
        values = value if isinstance(value, list) and self.parameter.multiple else [value]
        wrong = [one for one in values if type(one) not in types]
        if wrong or (self.parameter.multiple and not isinstance(value, list)):
            raise file.refusal(self.key, f"must be {what}")
        try:
            self.converted(value)
        except typer.BadParameter as error:
            raise file.refusal(self.key, f"is wrong: {error.message}") from None
        return value

    def converted(self, value: Any) -> Any:
        """A value as its command gets it. Whether a path exists is the command's matter."""
        if self.parameter.type_descriptor.annotation is Path:
            return value
        return self.parameter.process_value(typer.Context(_NONE), value)


@dataclass(frozen=True)
class Loaded:
    """The table of settings with the values of the configuration file, by variable, and where these are."""

    settings: Mapping[str, Setting]
    file: ConfigFile | None
    values: Mapping[str, Any]
    places: Mapping[str, str]

    def defaults(self, group: Any) -> dict[str, Any]:
        """The values as the command line takes them: by the words of commands, then by parameter."""
        return {
            name: self.defaults(command) if hasattr(command, "commands") else self._of(command)
            for name, command in group.commands.items()
        }

    def _of(self, command: Any) -> dict[str, Any]:
        return {
            each.name: self.values[each.envvar]
            for each in command.params
            if each.envvar in self.values
        }


def settings_of(root: Any) -> dict[str, Setting]:
    """All settings, by variable. Options of services get their variables here, by the rule of their names."""
    common = {each.variable: (each.key,) for each in KEYS.values()}
    found: dict[str, Setting] = {}
    for parameter in root.commands["config"].params:
        if parameter.envvar in common:
            found[parameter.envvar] = _setting(common[parameter.envvar], parameter)
    for table, commands in _COMMANDS.items():
        known: set[tuple[str, ...]] = set()
        for number, name in enumerate(commands):
            for parameter in _command(root, name).params:
                if parameter.param_type_name == "argument" or parameter.name in _OF_A_CALL:
                    continue
                key = (table, _option(parameter).removeprefix("--").replace("-", "_"))
                if parameter.envvar in common or (number and key not in known):
                    continue
                known.add(key)
                parameter.envvar = parameter.envvar or f"ANABRANCH_{'__'.join(key)}".upper()
                found.setdefault(parameter.envvar, _setting(key, parameter))
    return found


def _setting(key: tuple[str, ...], parameter: Any) -> Setting:
    return Setting(key, parameter.envvar, _option(parameter), parameter)


def _option(parameter: Any) -> str:
    longest: str = max(parameter.opts, key=len)
    return longest


def _command(root: Any, name: str) -> Any:
    for word in name.split():
        root = root.commands[word]
    return root


def load(root: Any, file: ConfigFile | None) -> Loaded:
    """The settings with the values of ``file``, and of files of secrets that variables name.

    Raises: InvalidArgument: an unknown key, or a wrong value.
    """
    settings = settings_of(root)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place, setting, value in _given(settings.values(), file):
        if setting.variable in values:
            raise InvalidArgument(f"{place}: {setting.name} is given twice, also by a file")
        values[setting.variable] = value
        places[setting.variable] = place
    for setting in settings.values():
        variable = f"{setting.variable}{_FILE.upper()}"
        if setting.is_secret and (path := os.environ.get(variable)):
            values[setting.variable] = secret_of(path, f"${variable}")
            places[setting.variable] = f"${variable}"
    return Loaded(settings, file, values, places)


def _given(settings: Any, file: ConfigFile | None) -> Iterator[tuple[str, Setting, Any]]:
    """The settings that the file has, with their places and values."""
    if file is None:
        return
    by_key = {setting.key: setting for setting in settings}
    files = {
        (*key[:-1], key[-1] + _FILE): setting
        for key, setting in by_key.items()
        if setting.is_secret
    }
    given: dict[tuple[str, ...], Any] = {}
    for name, value in file.document.items():
        if name in KEYS:
            given[name,] = value
        elif name in SERVICES:
            file.check_known(
                (name,), value, {key[1] for key in (*by_key, *files) if key[0] == name}
            )
            given |= {(name, each): one for each, one in value.items()}
    for key, value in given.items():
        if key in files:
            yield file.place(*key), files[key], file.secret(key, value)
        else:
            yield file.place(*key), by_key[key], by_key[key].checked(value, file)


def command(
    context: typer.Context,
    options: ConnectionOptions,
    log_format: LogFormat = "text",
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show each setting's value, and where it comes from: an option, a variable, the file, or the default.

    Nothing is sent. Values that may be secret are not shown.
    """
    loaded: Loaded = context.find_root().obj
    rows = [
        *(_row(setting, context, loaded) for setting in loaded.settings.values()),
        *_kafka_rows(options, loaded.file),
    ]
    unread = _unread(loaded)
    document = {
        "file": str(loaded.file.path) if loaded.file else None,
        "settings": rows,
        "not_read": unread,
    }
    named = f"file: {document['file']}" if loaded.file else "file: none (--config FILE names one)"
    print_result(
        document,
        Grid("Settings", rows, ("setting", Column("value", _shown), "source")),
        named,
        *(f"${name} is not read: did you mean ${near}?" for name, near in unread.items()),
        as_json=json,
    )


def _row(setting: Setting, context: Any, loaded: Loaded) -> dict[str, Any]:
    parameter = setting.parameter
    if len(setting.key) == 1:
        value, source = context.params[parameter.name], context.get_parameter_source(parameter.name)
    else:  # as its command would read it, if it got no options
        within = type(context)(
            context.command, default_map={parameter.name: loaded.values.get(setting.variable)}
        )
        value, source = parameter.consume_value(within, {})
        value = setting.converted(value)
    sources = {
        "COMMANDLINE": f"option {setting.option}",
        "ENVIRONMENT": f"${setting.variable}",
        "DEFAULT_MAP": loaded.places.get(setting.variable, ""),
    }
    return {
        "setting": setting.name,
        "value": None if setting.is_secret else _plain(value),
        "source": sources.get(source.name, "default"),
        "secret": setting.is_secret,
        "option": setting.option,
        "variable": setting.variable,
    }


def _kafka_rows(options: ConnectionOptions, file: ConfigFile | None) -> list[dict[str, Any]]:
    """librdkafka's options, from all places where they can be."""
    rows: dict[str, dict[str, Any]] = {}
    for source, found in layers_of(options.kafka, "--kafka", options.kafka_file, options.config):
        for name, value in found.items():
            place = source
            if file is not None and source == str(options.config):
                given = name if (KAFKA, name) in file.lines else name + _FILE
                place = file.place(KAFKA, given)
            rows[name] = {
                "setting": f"{KAFKA}.{name}",
                "value": None if is_secret(name) else value,
                "source": place,
                "secret": is_secret(name),
                "option": "--kafka",
                "variable": None,
            }
    return list(rows.values())


def _shown(row: Mapping[str, Any]) -> Any:
    value = row["value"]
    if row["secret"]:
        return None if row["source"] == "default" else "(set)"
    if isinstance(value, int | float):  # as in the file, without commas between thousands
        return str(value).lower()
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return str(value) if isinstance(value, Path) else value


def _unread(loaded: Loaded) -> dict[str, str]:
    """Unknown variable -> the known variable that it may be a misspelling of."""
    known = {CONFIG_VARIABLE, *_OTHERS, *loaded.settings}
    known |= {name + _FILE.upper() for name, each in loaded.settings.items() if each.is_secret}
    unknown = {name for name in os.environ if name.startswith("ANABRANCH_")} - known
    near = {name: get_close_matches(name, known, 1, 0.9) for name in sorted(unknown)}
    return {name: names[0] for name, names in near.items() if names}


# -- before the command line is parsed ---------------------------------------------------------------------


def named_command(root: Any, given: Sequence[str]) -> Any:
    """The command that the first words of a command line name; a group if there are too few."""
    for word in given:
        if word not in getattr(root, "commands", {}):
            break
        root = root.commands[word]
    return root


def word_after(given: Sequence[str], option: str) -> str | None:
    """The value of an option in a command line that is not parsed yet; the last one counts."""
    found = None
    for at, word in enumerate(given):
        if word == "--":
            break
        if word == option and at + 1 < len(given):
            found = given[at + 1]
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found
