"""The options that many commands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BOOTSTRAP_VARIABLE = "ANABRANCH_BOOTSTRAP"
PREFIX_VARIABLE = "ANABRANCH_PREFIX"
DEFAULT_TIMEOUT_S = 30.0

Bootstrap = Annotated[
    str | None,
    typer.Option(
        "--bootstrap",
        "-b",
        envvar=BOOTSTRAP_VARIABLE,
        metavar="HOST:PORT",
        help="A broker of the cluster; several with commas between.",
        show_default=False,
    ),
]
Prefix = Annotated[
    str,
    typer.Option(
        "--prefix",
        envvar=PREFIX_VARIABLE,
        metavar="NAME",
        help="Prefix of the topics commands, replies and status.",
    ),
]
Kafka = Annotated[
    list[str] | None,
    typer.Option(
        "--kafka",
        "-X",
        metavar="NAME=VALUE",
        help="A librdkafka setting, such as security.protocol=SASL_SSL, or @FILE with one a line. May be repeated.",
        show_default=False,
    ),
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Give up after so many seconds."),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="One JSON document instead of tables; errors as JSON too."),
]
Yes = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Don't ask; needed where nobody is at a terminal."),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show the traceback of an error."),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        envvar="ANABRANCH_KEY_FILE",
        metavar="FILE",
        help="The key that signs tokens, the same for all controllers "
        "(default: ~/.config/anabranch/token.key).",
        show_default=False,
    ),
]
