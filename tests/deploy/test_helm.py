"""The chart: its templates make objects that Kubernetes takes, for every way to set it up."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.documents import DEPLOY, ROOT, SETTINGS, fault_of
from deploy.gotemplate import Chart, TemplateError
from dlm.cli.inspect import helm_values
from dlm.client.cluster_file import ClusterToml
from dlm.config import resolve
from dlm.index.describe import PROCESS_MIB
from dlm.index.layout import read_manifest
from dlm.server.config import ServerConfig
from dlm.server.sets import read_sets

FOLDER = DEPLOY / "helm/dlm"
SCHEMA = json.loads((FOLDER / "values.schema.json").read_text())
TINY = read_manifest(ROOT / "shards/tiny/exact-2")
PLAIN: dict[str, Any] = {"insecure": True}
TLS = {"tls": {"secretName": "dlm-tls", "clientCertificates": True}}
TOKENS = {"tls": {"secretName": "dlm-tls"}, "tokens": {"secretName": "dlm-tokens"}}
PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
ALL = {
    **TOKENS,
    "tls": {"secretName": "dlm-tls", "ca": PEM},
    "clients": {"tokenFile": "/etc/dlm-token/token"},
    "shards": 2,
    "replicas": 3,
    "directories": ["/models/new", "/models/old"],
    "followDirectories": True,
    "volume": {"persistentVolumeClaim": None, "nfs": {"server": "files", "path": "/models"}},
    "server": {"mlock": True, "max_in_flight": 512, "shutdown_timeout_s": 2.5},
    "image": {"tag": "1", "pullSecrets": [{"name": "pull"}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "podAnnotations": {"team": "speech"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "speech", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
}
STORED = {**PLAIN, "model": {"url": "s3://models/en", "cacheSize": "9Gi"}}
FOLLOWED = {**TOKENS, "model": {"sets": "s3://models/en.sets"}, "serviceAccountName": "reader"}
SET_UPS = [PLAIN, TLS, TOKENS, ALL, {**PLAIN, "podDisruptionBudget": {"enabled": False}}]
SET_UPS += [STORED, FOLLOWED]


@pytest.fixture(scope="module")
def chart() -> Chart:
    """Read once; rendering changes nothing but what it says was used."""
    return Chart(FOLDER)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The objects of one kind."""
    return [o for o in objects if o["kind"] == kind]


def leaves(values: dict[str, Any], at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths of values.yaml that hold a value; an empty object is one."""
    out: set[tuple[str, ...]] = set()
    for name, value in values.items():
        inner = isinstance(value, dict) and value
        out |= leaves(value, (*at, name)) if inner else {(*at, name)}
    return out


def test_the_values_keep_to_the_schema(chart: Chart) -> None:
    """The defaults, and every set-up that is tested here."""
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(chart.values, SCHEMA)
    assert SCHEMA["properties"].keys() - {"global"} == chart.values.keys()


@pytest.mark.promise("helm")
@pytest.mark.parametrize(
    "given",
    [
        {"shards": 0},
        {"replica": 2},
        {"directories": ["models/current"]},
        {"server": {"port": 1}},
        {"server": {"tokens": "/etc/tokens"}},
        {"tls": {"secret": "x"}},
        {"tls": {"ca": "ca.crt"}},
        {"serviceMonitor": {"interval": "often"}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_is_no_value(given: dict[str, Any], chart: Chart) -> None:
    """A slip of the pen is told before anything is changed."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**chart.values, **given}, SCHEMA)


def test_braces_are_balanced_and_every_value_is_used(chart: Chart) -> None:
    """What templates name is in values.yaml (or rendering fails), and what is there is named."""
    for file in (FOLDER / "templates").iterdir():
        text = file.read_text()
        assert text.count("{{") == text.count("}}"), file.name
    for given in SET_UPS:
        chart.render(given)
    named = chart.used
    for path in leaves(chart.values):
        assert any(path[: len(n)] == n for n in named), f"no template uses {'.'.join(path)}"


@pytest.mark.parametrize("given", SET_UPS, ids=range(len(SET_UPS)))
def test_kubernetes_takes_the_objects(given: dict[str, Any], chart: Chart) -> None:
    """By the schemas of Kubernetes, every field known."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="needs the extra deploy: pip install -e '.[deploy]'"
    )
    for version in ("1.27", "1.31"):
        for found in chart.objects(given):
            if found["kind"] != "ServiceMonitor":
                validator.validate(found, version, strict=True)


@pytest.mark.parametrize("given", SET_UPS, ids=range(len(SET_UPS)))
def test_objects_find_each_other(given: dict[str, Any], chart: Chart) -> None:
    """Names are unique and short; selectors choose the pods they mean and no others."""
    objects = chart.objects(given)
    names = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]{1,52}", name) for _, name in names)
    sets = of_kind(objects, "StatefulSet")
    pods = {s["metadata"]["name"]: s["spec"]["template"]["metadata"]["labels"] for s in sets}

    def chosen(selector: dict[str, str]) -> list[str]:
        return [name for name, labels in pods.items() if selector.items() <= labels.items()]

    for found in sets:
        name = found["metadata"]["name"]
        assert chosen(found["spec"]["selector"]["matchLabels"]) == [name]
        assert ("Service", found["spec"]["serviceName"]) in names
        (spread,) = found["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert chosen(spread["labelSelector"]["matchLabels"]) == [name]
        maps = [v["configMap"]["name"] for v in volumes(found).values() if "configMap" in v]
        assert all(("ConfigMap", name) in names for name in maps)
    for service in of_kind(objects, "Service"):
        headless = service["spec"].get("clusterIP") == "None"
        expected = list(pods) if headless else [service["metadata"]["name"]]
        assert chosen(service["spec"]["selector"]) == expected
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert chosen(budget["spec"]["selector"]["matchLabels"]) == [budget["metadata"]["name"]]
    for monitor in of_kind(objects, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = of_kind(objects, "Service")
        found = [s for s in services if wanted.items() <= s["metadata"]["labels"].items()]
        assert [s["metadata"]["name"] for s in found] == ["lm-dlm-pods"]
        ports = {port["name"] for port in found[0]["spec"]["ports"]}
        assert {e["port"] for e in monitor["spec"]["endpoints"]} <= ports


def volumes(found: dict[str, Any]) -> dict[str, Any]:
    """Those of a StatefulSet's pods, by name."""
    return {v["name"]: v for v in found["spec"]["template"]["spec"]["volumes"]}


def test_servers_follow_the_folders_of_a_config_map(chart: Chart, tmp_path: Path) -> None:
    """As a server reads it; another list restarts no pod."""
    found = [
        chart.objects({**ALL, "directories": names}) for names in (["/models/a"], ["/models/b"])
    ]
    for objects, name in zip(found, "ab", strict=True):
        listed = next(m for m in objects if m["metadata"]["name"] == "lm-dlm-sets")["data"]["sets"]
        (tmp_path / "sets").write_text(listed)
        assert read_sets(tmp_path / "sets") == [Path("/models") / name]
    before, after = (of_kind(objects, "StatefulSet") for objects in found)
    assert before == after


@pytest.mark.parametrize("given", SET_UPS, ids=range(len(SET_UPS)))
def test_a_pod_has_what_its_server_needs_and_no_more(given: dict[str, Any], chart: Chart) -> None:
    """Command, settings, files, rights and time, as the code has them."""
    objects = chart.objects(given)
    toml = next(m for m in objects if m["metadata"]["name"] == "lm-dlm-server")["data"]
    settings = tomllib.loads(toml["server.toml"])["server"]
    assert settings.keys() <= SETTINGS
    known = {f: v for f, v in settings.items() if f in ServerConfig.__dataclass_fields__}
    for index, found in enumerate(of_kind(objects, "StatefulSet")):
        pod = found["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert fault_of(tuple(container["args"])) is None
        place = container["args"].index("--shard")
        assert container["args"][place + 1] == str(index)
        mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert mounted.keys() == volumes(found).keys()
        assert ("sets" in settings) != any("/models/" in one for one in container["args"])
        for name in ("tls_cert", "tls_key", "tls_client_ca", "tokens", "sets"):
            path = settings.get(name, "/etc/dlm/server/x")
            assert path.startswith("s3:") or str(Path(path).parent) in mounted.values(), name
        probes = [container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")]
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        assert ports == {"grpc": settings["port"], "metrics": settings["metrics_port"]}
        over_grpc = [probe["grpc"] for probe in probes if "grpc" in probe]
        # Neither a token nor a certificate can be brought by a probe.
        assert bool(over_grpc) == (given.get("insecure", False))
        assert all(
            probe == {"port": ports["grpc"], "service": "dlm.v1.Shard"} for probe in over_grpc
        )
        assert pod["terminationGracePeriodSeconds"] > settings.get(
            "drain_grace_s", ServerConfig().drain_grace_s
        ) + settings.get("shutdown_timeout_s", ServerConfig().shutdown_timeout_s)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
    local = {**known, "host": "127.0.0.1"}
    config = resolve(ServerConfig, "server", flags=local, environ={})
    assert config.port == settings["port"]


@pytest.mark.parametrize("given", SET_UPS, ids=range(len(SET_UPS)))
def test_clients_are_told_where_the_shards_are(
    given: dict[str, Any], chart: Chart, tmp_path: Path
) -> None:
    """cluster.toml names the Service of each shard, by the client's own parser."""
    objects = chart.objects(given)
    data = next(o for o in objects if o["metadata"]["name"] == "lm-dlm-clients")["data"]
    (tmp_path / "cluster.toml").write_text(data["cluster.toml"])
    services = {o["metadata"]["name"] for o in of_kind(objects, "Service")}
    endpoints = ClusterToml(tmp_path / "cluster.toml").servers()
    assert [e.shard for e in endpoints] == list(range(len(endpoints)))
    assert {e.address.split(".")[0] for e in endpoints} == services - {"lm-dlm-pods"}
    said = tomllib.loads(data["cluster.toml"])
    assert ("tls" in said) == ("tls" in given)
    assert said.get("token_file", "") == given.get("clients", {}).get("tokenFile", "")
    pem = given.get("tls", {}).get("ca")
    assert data.get("ca.crt") == pem
    if pem:  # where the client's own parser looks for it, in the folder that is mounted
        security = ClusterToml(tmp_path / "cluster.toml").security()
        assert Path(security.ca) == tmp_path / "ca.crt"
    assert all("PRIVATE KEY" not in text for text in data.values())
    notes = chart.render(given)["NOTES.txt"]
    hosts = [e.address.rpartition(":")[0] for e in endpoints]
    assert all((host in notes) == ("tls" in given) for host in hosts)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tokens": {"secretName": "t"}},
        {"tls": {"secretName": "s"}},
        {"insecure": True, "tls": {"clientCertificates": True}},
    ],
    ids=str,
)
def test_a_chart_that_lets_everybody_in_is_refused(given: dict[str, Any], chart: Chart) -> None:
    """Before anything is installed, as the server itself would refuse."""
    with pytest.raises(TemplateError, match=r"authentication|tls\.secretName"):
        chart.render(given)


@pytest.mark.promise("helm")
def test_sizes_come_from_the_files_of_the_shard_set(chart: Chart) -> None:
    """`dlm info --helm`: values that the schema takes, and memory for all that is mapped."""
    given = yaml.safe_load(helm_values(TINY))
    jsonschema.validate({**chart.values, **given}, SCHEMA)
    assert given["shards"] == TINY.shards
    request, limit = (
        int(given["resources"][of]["memory"].removesuffix("Mi")) for of in ("requests", "limits")
    )
    assert request == 1 + PROCESS_MIB  # the files of this set are below a MiB
    assert limit == -(-request * 5 // 4)
    assert chart.objects({**PLAIN, **given})


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("a {{- 1 }} b", "a1 b"),
        ("a {{ 1 -}} b", "a 1b"),
        ("{{ if .Values.x }}{{ if .Values.y }}1{{ else }}2{{ end }}{{ else }}3{{ end }}", "2"),
        ("{{ range $k, $v := .Values.map }}{{ $k }}={{ toJson $v }};{{ end }}", "a=1;b=true;"),
        ("{{ range $i := until (int .Values.two) }}{{ $i | quote }}{{ end }}", '"0""1"'),
        ("{{ with .Values.map }}{{ toYaml . | nindent 2 }}{{ end }}", "\n  a: 1\n  b: true"),
        ("{{ with .Values.y }}no{{ end }}{{/* said } */}}!", "!"),
    ],
)
def test_the_renderer_does_what_helm_does(text: str, rendered: str, tmp_path: Path) -> None:
    """The constructs that the chart uses, each by itself."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("appVersion: 0.1.0")
    (tmp_path / "values.yaml").write_text("{x: 1, y: '', two: 2, map: {b: true, a: 1}}")
    (tmp_path / "templates/a.txt").write_text(text)
    assert Chart(tmp_path).render() == {"a.txt": rendered}


@pytest.mark.parametrize(
    "text",
    ["{{ .Values.none }}", "{{ if 1 }}", "{{ end }}", "{{ lookup 1 }}", "{{ $none }}"],
)
def test_the_renderer_refuses_what_it_does_not_know(text: str, tmp_path: Path) -> None:
    """So that a template is never half tested."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("appVersion: 0.1.0")
    (tmp_path / "values.yaml").write_text("{x: 1}")
    (tmp_path / "templates/a.txt").write_text(text)
    with pytest.raises(TemplateError):
        Chart(tmp_path).render()
