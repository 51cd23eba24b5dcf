"""The files of `infra/` against the programs that read them, the metrics that there are, and the runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from anabranch.controller import metrics as of_leaders
from anabranch.controller.service import LEAVE_GROUP_S, STOP_LEADER_S
from anabranch.ledger import watch as of_ledgers
from anabranch.processing import metrics as of_workers
from tests.deploy.files import (
    APP,
    CONTROLLER,
    INFRA,
    KINDS,
    PROCESSOR,
    ROOT,
    SECRETS,
    STATE,
    STREAMS,
    WEB,
    compose,
    dockerfile,
    kustomize,
    manifests,
    named,
    settings,
    unit,
)
from tests.deploy.prometheus import program

KUBERNETES = "1.34"
USER = 10001
# `systemd-analyze security` rates a unit from 0 (confined) to 10.
MOST_EXPOSED = 2.5
OF_PROMETHEUS = {"up", "process_resident_memory_bytes"}
# What a process may write to.
WRITABLE = {CONTROLLER: [STATE], WEB: ["/tmp"], PROCESSOR: [STATE, "/tmp"], STREAMS: []}
OF_RUNBOOK = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")


def rules() -> list[dict[str, Any]]:
    """All alerts."""
    groups = yaml.safe_load((INFRA / "monitoring/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    """All queries of the dashboard."""
    panels = json.loads((INFRA / "monitoring/dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


# -- Kubernetes -----------------------------------------------------------------------------------------


def test_the_manifests_are_valid() -> None:
    found = manifests()
    for each in found:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    assert sorted(each["kind"] for each in found) == [
        "ConfigMap", "ConfigMap", "Deployment", "PodDisruptionBudget", "Secret", "Service",
        "StatefulSet", "StatefulSet",
    ]  # fmt: skip


def test_controllers_and_the_processor_are_usable_alone_and_together(tmp_path: Path) -> None:
    """Each manifest is there once, and is the same in each combination."""
    for text in (
        "resources: [infra/settings]\ncomponents: [infra/processor]",
        "resources: [infra/kubernetes]",
    ):
        (tmp_path / "kustomization.yaml").write_text(text)
        shutil.copytree(INFRA, tmp_path / "infra", dirs_exist_ok=True)
        found = kustomize(tmp_path)
        assert found
        assert all(manifests().count(each) == 1 for each in found)


def test_a_processor_may_take_minutes_to_answer_first() -> None:
    (container,) = [each for _, each in pods() if each["name"] == PROCESSOR]
    probe = container["startupProbe"]
    assert probe["httpGet"] == container["livenessProbe"]["httpGet"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300


def test_an_invalid_manifest_is_found() -> None:
    wrong = json.loads(json.dumps(named("PodDisruptionBudget", "anabranch-controller")))
    wrong["spec"]["maxUnavailabel"] = wrong["spec"].pop("maxUnavailable")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each kind of pod, with each of its containers."""
    for each in manifests():
        if each["kind"] in ("StatefulSet", "Deployment"):
            pod = each["spec"]["template"]["spec"]
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                yield pod, container


def test_pods_have_no_root_and_write_only_their_state() -> None:
    for pod, container in pods():
        given = pod["securityContext"]
        assert (given["runAsNonRoot"], given["runAsUser"], given["fsGroup"]) == (True, USER, USER)
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["automountServiceAccountToken"] is False
        writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
        assert writable == WRITABLE[container["name"]]
        (volume,) = (each for each in pod["volumes"] if "secret" in each)
        secret = named("Secret", "anabranch-kafka")["metadata"]["name"]
        assert volume["secret"] == {"secretName": secret, "defaultMode": 0o440}


def test_the_budget_the_service_and_the_set_mean_the_same_pods() -> None:
    controllers = named("StatefulSet", "anabranch-controller")["spec"]
    labels = controllers["template"]["metadata"]["labels"]
    assert controllers["selector"]["matchLabels"] == labels
    assert named("PodDisruptionBudget", "anabranch-controller")["spec"] == {
        "maxUnavailable": 1,
        "selector": {"matchLabels": labels},
    }
    assert named("Service", controllers["serviceName"])["spec"]["selector"] == labels
    assert controllers["replicas"] > 1


# -- the image and compose ------------------------------------------------------------------------------


def test_containers_have_no_root_and_write_only_their_state() -> None:
    assert dockerfile()["USER"] == f"{USER}:{USER}"
    assert f"-o {USER} -g {USER} {STATE}" in dockerfile()["RUN"]
    for name, service in compose()["services"].items():
        if "build" not in service:
            continue
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        writable = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
        role = CONTROLLER if name.startswith(CONTROLLER) else name
        volumes = [f"{name}:{STATE}"] if STATE in WRITABLE[role] else []
        assert (writable, service.get("tmpfs", [])) == (volumes, WRITABLE[role][len(volumes) :])


def test_ports_of_compose_are_of_this_machine_alone() -> None:
    ports = [port for each in compose()["services"].values() for port in each.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_has_what_its_settings_name() -> None:
    services = compose()["services"]
    brokers = [f"{name}:9092" for name in services if name.startswith("kafka")]
    assert settings()["ANABRANCH_BOOTSTRAP"].split(",") == brokers
    assert len(brokers) == 3
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (INFRA / source).exists() if "/" in source else source in compose()["volumes"], (
                name
            )
    scraped = yaml.safe_load((INFRA / "monitoring/prometheus.yml").read_text())["scrape_configs"]
    targets = [config["targets"] for job in scraped for config in job["static_configs"]]
    controllers = [name for name in services if name.startswith(CONTROLLER)]
    assert targets == [
        [f"{name}:{dockerfile()['EXPOSE']}" for name in controllers],
        [f"{PROCESSOR}:9465"],
    ]


def test_the_module_of_the_processor_is_where_its_files_say() -> None:
    module, _, app = settings("processor/totals.env")["PROCESSOR"].partition(":")
    service, (pod,) = (
        compose()["services"][PROCESSOR],
        [each for _, each in pods() if each["name"] == PROCESSOR],
    )
    assert service["command"][:3] == pod["args"][:3] == ["processor", "run", f"{module}:{app}"]
    assert service["environment"]["PYTHONPATH"] == APP
    assert f"./processor:{APP}:ro" in service["volumes"]
    assert {"name": "app", "mountPath": APP, "readOnly": True} in pod["volumeMounts"]
    assert set(named("ConfigMap", "anabranch-totals")["data"]) == {f"{module}.py", "streams.toml"}
    (applied,) = [each["args"] for _, each in pods() if each["name"] == STREAMS]
    assert applied == ["apply", f"{APP}/streams.toml"]
    assert f"anabranch {' '.join(applied)};" in compose()["services"][STREAMS]["entrypoint"][-1]


# -- systemd --------------------------------------------------------------------------------------------


def installed(root: Path) -> list[str]:
    """A folder with the units, and what they need to be there, as a machine has them. Returns their names."""
    units = root / "etc/systemd/system"
    shutil.copytree(INFRA / "systemd", units)
    program = root / "opt/anabranch/bin/anabranch"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    shutil.copytree("/usr/lib/systemd/system", root / "usr/lib/systemd/system", symlinks=True)
    return [
        each.name.replace("@.", "@totals.") for each in units.iterdir() if each.suffix == ".service"
    ]


def analyze(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", f"--root={root}", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_units_are_valid(tmp_path: Path) -> None:
    names = installed(tmp_path)
    assert len(names) == 3
    for name in names:
        done = analyze(tmp_path, "verify", "--man=no", "--recursive-errors=no", name)
        assert (done.returncode, done.stderr) == (0, ""), name


def test_a_wrong_unit_is_found(tmp_path: Path) -> None:
    installed(tmp_path)
    with (tmp_path / "etc/systemd/system/anabranch-.service.d/common.conf").open("a") as file:
        file.write("ProtectSystme=strict\n")
    done = analyze(tmp_path, "verify", "--man=no", "--recursive-errors=no", "anabranch-web.service")
    assert "ProtectSystme" in done.stderr


def test_the_units_are_confined(tmp_path: Path) -> None:
    for name in installed(tmp_path):
        most = f"--threshold={MOST_EXPOSED * 10:.0f}"
        done = analyze(tmp_path, "security", "--offline=true", most, name)
        assert done.returncode == 0, done.stdout
    assert unit("anabranch-controller.service")["DynamicUser"] == ["yes"]


# -- all of them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_controller_has_time_to_hand_over(kind: str) -> None:
    parts = KINDS[kind]()
    assert sum(part.is_controller for part in parts) == 2
    for part in parts:
        assert not part.is_controller or part.grace_s >= 1.5 * (STOP_LEADER_S + LEAVE_GROUP_S)


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_are_in_a_file(kind: str) -> None:
    for part in KINDS[kind]():
        given = [part.environment.get("ANABRANCH_KAFKA_FILE", ""), *part.words]
        assert f"{SECRETS}/kafka.properties" in given
        assert "-X" not in part.words
        assert "--kafka" not in part.words


# -- monitoring -----------------------------------------------------------------------------------------


def names_of_metrics() -> set[str]:
    """As Prometheus has them."""
    found = set(OF_PROMETHEUS)
    for table in (of_leaders.TABLE, of_workers.TABLE, of_ledgers.TABLE):
        for name, number in table.numbers.items():
            found.add(f"anabranch_{name}{'_total' if number.kind == 'counter' else ''}")
        found.add(f"anabranch_{table.timed[0]}_bucket")
    return found


def named_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:anabranch_\w+|process_\w+|up)\b", query))


def test_queries_name_metrics_that_there_are() -> None:
    for query in (*queries(), *(rule["expr"] for rule in rules())):
        named = named_in(query)
        assert named, query
        assert named <= names_of_metrics(), query


def test_promtool_takes_the_rules() -> None:
    command = [str(program("promtool")), "check", "rules", f"{INFRA}/monitoring/alerts.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def anchors(page: str) -> set[str]:
    """Of the titles of a page."""
    titles = re.findall(r"^#+ (.*)$", page, re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def line_of(alert: Mapping[str, Any]) -> str:
    """The row of the runbook's table of symptoms that names an alert."""
    (found,) = [
        line for line in OF_RUNBOOK.splitlines()
        if line.startswith("|") and f"`{alert['alert']}`" in line
    ]  # fmt: skip
    return found


@pytest.mark.parametrize("alert", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_has_a_line_in_the_runbook(alert: Mapping[str, Any]) -> None:
    line = line_of(alert)
    page, anchor = alert["annotations"]["runbook"].split("#")
    assert page == "docs/runbook.md"
    assert anchor in anchors(OF_RUNBOOK)
    assert f"(#{anchor})" in line
    assert alert["labels"]["severity"] in ("page", "ticket")


def test_the_runbook_names_no_other_alert() -> None:
    assert set(re.findall(r"`(Anabranch[A-Z]\w+)`", OF_RUNBOOK)) == {
        rule["alert"] for rule in rules()
    }
