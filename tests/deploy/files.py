"""What `infra/` says of each process: its command, environment, probes and grace period, however it is run.

Paths and addresses are those of a machine of its own; `Place` puts them into a test's folder and on an address of
loopback, and changes nothing else.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"
STATE, SECRETS = "/var/lib/anabranch", "/etc/anabranch"
# Where the module of the processor is: in containers, and on a machine.
APP, APP_OF_UNITS = "/app", "/opt/totals"
CONTROLLER, WEB, PROCESSOR, STREAMS = "controller", "web", "processor", "streams"
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0}


@dataclass(frozen=True)
class Part:
    """A process that stays. ``words``: the arguments of `anabranch`. ``live``: a probe that restarts it, or None.

    ``ready``, ``live``: a URL, or the text of a Python program that fails if the process is not so.
    """

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    ready: str | None
    live: str | None
    grace_s: float

    @property
    def role(self) -> str:
        """`CONTROLLER`, `WEB` or `PROCESSOR`."""
        return self.words[0]

    @property
    def is_controller(self) -> bool:
        return self.role == CONTROLLER


def settings(file: str = "settings/anabranch.env") -> dict[str, str]:
    """The environment that all three kinds share, or that of another file."""
    lines = (INFRA / file).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@cache
def dockerfile() -> dict[str, str]:
    """The last value of each instruction of the last stage; ``ENV`` as it is written."""
    text = (INFRA / "Dockerfile").read_text().replace("\\\n", " ")
    stage = text.rpartition("\nFROM ")[2]
    found = re.findall(r"^([A-Z]+) (.*)$", stage, re.M)
    return {name: value.strip() for name, value in found}


def _of_image(command: list[str] | None) -> tuple[str, ...]:
    assert json.loads(dockerfile()["ENTRYPOINT"]) == ["anabranch"]
    return tuple(command or json.loads(dockerfile()["CMD"]))


def _program(words: list[str]) -> str:
    """The text of a probe that is a program."""
    *python, option, text = [word for word in words if word != "CMD"]
    assert (python, option) == (["python"], "-c")
    return text


def seconds(text: str) -> float:
    """``60s`` or ``1m``."""
    number, unit = re.fullmatch(r"(\d+)(\w*)", text).groups()  # type: ignore[union-attr]
    return float(number) * _UNITS[unit or "s"]


# -- compose --------------------------------------------------------------------------------------------


@cache
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((INFRA / "compose.yaml").read_text())
    return found


def of_compose() -> list[Part]:
    own = _program(json.loads(dockerfile()["HEALTHCHECK"].partition("CMD ")[2]))
    parts = []
    for name, service in compose()["services"].items():
        if "build" not in service or name == STREAMS:
            continue
        assert service["env_file"] == ["settings/anabranch.env"]
        test = service.get("healthcheck", {}).get("test")
        parts.append(
            Part(
                name,
                _of_image(service.get("command")),
                settings() | service.get("environment", {}),
                _program(test) if test else own,
                None,
                seconds(service["stop_grace_period"]),
            )
        )
    return parts


# -- Kubernetes -----------------------------------------------------------------------------------------


@cache
def manifests() -> list[dict[str, Any]]:
    """As kustomize makes them, of controllers, pages and the processor."""
    return kustomize(INFRA / "kubernetes-processor")


def kustomize(folder: Path) -> list[dict[str, Any]]:
    """What ``kubectl apply -k`` would send for a folder."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def named(kind: str, name: str) -> dict[str, Any]:
    """The manifest of this kind whose name is this, or begins with it and ends with kustomize's hash."""
    pattern = re.compile(rf"{name}(-[0-9a-z]{{10}})?")
    (found,) = [
        each for each in manifests()
        if each["kind"] == kind and pattern.fullmatch(each["metadata"]["name"])
    ]  # fmt: skip
    return found


def of_kubernetes() -> list[Part]:
    parts = []
    for kind in ("StatefulSet", "Deployment"):
        for each in manifests():
            if each["kind"] != kind:
                continue
            pod = each["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            (given,) = container["envFrom"]
            environment = named("ConfigMap", "anabranch-settings")
            assert given["configMapRef"]["name"] == environment["metadata"]["name"]
            parts += [
                Part(
                    f"{each['metadata']['name']}-{n}",
                    _of_image(container.get("args")),
                    environment["data"]
                    | {each["name"]: each["value"] for each in container.get("env", ())},
                    _probe(container, "readinessProbe"),
                    _probe(container, "livenessProbe"),
                    pod.get("terminationGracePeriodSeconds", 30.0),
                )
                for n in range(each["spec"]["replicas"])
            ]
    return parts


def _probe(container: Mapping[str, Any], which: str) -> str | None:
    probe = container.get(which)
    if probe is None:
        return None
    if "exec" in probe:
        return _program(probe["exec"]["command"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    return f"http://127.0.0.1:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"


# -- systemd --------------------------------------------------------------------------------------------


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a unit's service with those for all units: name -> values."""
    found: dict[str, list[str]] = {}
    folder = INFRA / "systemd"
    for file in (folder / name, folder / "anabranch-.service.d/common.conf"):
        for line in file.read_text().splitlines():
            if "=" in line and not line.startswith("#"):
                key, value = line.split("=", 1)
                found.setdefault(key, []).append(value)
    return found


def of_systemd() -> list[Part]:
    """Two machines with a controller, one of them with the pages and a processor. systemd has no probes."""
    own = settings("processor/totals.env")
    return [
        _of_unit("anabranch-controller", 1, {}),
        _of_unit("anabranch-controller", 2, {}),
        _of_unit("anabranch-web", 1, {}),
        _of_unit("anabranch-processor@", 1, own),
    ]


def _of_unit(name: str, number: int, own: Mapping[str, str]) -> Part:
    """``own``: what the instance's environment file has."""
    found = unit(f"{name}.service")
    (start,), (stop,) = found["ExecStart"], found["TimeoutStopSec"]
    files = [f"{SECRETS}/processors/%i.env"] if own else []
    assert found["EnvironmentFile"] == [*files, f"{SECRETS}/anabranch.env"]
    for variable, value in own.items():
        start = start.replace(f"${{{variable}}}", value)
    assert found["LoadCredential"] == [f"kafka.properties:{SECRETS}/kafka.properties"]
    start = start.replace("${STATE_DIRECTORY}", STATE).replace("${CREDENTIALS_DIRECTORY}", SECRETS)
    program, *words = shlex.split(start)
    assert program == "/opt/anabranch/bin/anabranch"
    return Part(f"{name}-{number}", tuple(words), settings() | dict(own), None, None, seconds(stop))


KINDS = {"compose": of_compose, "kubernetes": of_kubernetes, "systemd": of_systemd}


# -- on this machine ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a part runs in a test: a folder and an address of loopback of its own."""

    folder: Path
    address: str
    bootstrap: str

    def put(self, text: str) -> str:
        """A word or a probe, with this place's paths and addresses."""
        for there, here in (
            (STATE, f"{self.folder}/state"),
            (SECRETS, str(self.folder)),
            (APP_OF_UNITS, f"{INFRA}/processor"),
        ):
            text = text.replace(there, here)
        text = f"{INFRA}/processor" if text == APP else text
        return re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)\b", self.address, text)

    def words(self, part: Part) -> list[str]:
        words = [self.put(word) for word in part.words]
        # The pages listen to loopback's first address if they get no other one.
        moved = words[0] == WEB and "--host" not in words
        return [*words, "--host", self.address] if moved else words

    def environment(self, part: Part) -> dict[str, str]:
        given = {name: self.put(value) for name, value in part.environment.items()}
        return given | {"ANABRANCH_BOOTSTRAP": self.bootstrap}
