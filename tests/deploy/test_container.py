"""The image and compose.yaml: what they copy exists, nothing is root, nothing is secret."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from connect_proxy import ConnectProxy
from deploy.documents import DEPLOY, ROOT, SETTINGS, load, texts
from dlm import __version__
from dlm.client.cluster_file import ClusterToml
from dlm.config import resolve
from dlm.server.config import ServerConfig

# One instruction a list: its lines joined, comments left out.
_LINES = re.sub(r"^#.*\n", "", texts()["Containerfile"], flags=re.M).replace("\\\n", " ")
INSTRUCTIONS = [line.split(None, 1) for line in _LINES.split("\n") if line.strip()]
COMPOSE = load("compose.yaml")
SHARDS = {n: s for n, s in COMPOSE["services"].items() if n.startswith("shard-")}

# What no service is given.
RIGHTS = {"cap_add", "devices", "network_mode", "pid", "privileged"}


def stage_of(instruction: int) -> int:
    """Which FROM an instruction stands under."""
    return sum(words[0] == "FROM" for words in INSTRUCTIONS[: instruction + 1])


def environment() -> dict[str, str]:
    """Variables of the image that runs."""
    last = max(stage_of(at) for at in range(len(INSTRUCTIONS)))
    lines = [w[1] for at, w in enumerate(INSTRUCTIONS) if w[0] == "ENV" and stage_of(at) == last]
    pairs = re.findall(r'(\w+)=("[^"]*"|\S*)', " ".join(lines))
    return {name: value.strip('"') for name, value in pairs}


def test_only_known_instructions_are_used() -> None:
    """A line that is no instruction is a build that fails."""
    known = {"ARG", "FROM", "ENV", "COPY", "RUN", "USER", "EXPOSE", "STOPSIGNAL"}
    known |= {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {words[0] for words in INSTRUCTIONS} <= known
    assert [w[1] for w in INSTRUCTIONS if w[0] == "FROM"] == [
        "python:${PYTHON}-slim AS build",
        "python:${PYTHON}-slim",
    ]


def test_everything_that_is_copied_exists() -> None:
    """From the repository, or from the stage before; nothing else comes in."""
    for at, (word, rest) in enumerate(INSTRUCTIONS):
        if word != "COPY":
            continue
        options = [w for w in rest.split() if w.startswith("--")]
        *sources, _ = [w for w in rest.split() if not w.startswith("--")]
        for source in sources:
            if "--from=build" in options:
                assert stage_of(at) == 2
                assert source == "/opt/dlm"
            else:
                assert (ROOT / source).exists(), source


def test_the_build_is_sent_what_it_copies_and_nothing_else() -> None:
    """A context without models and keys; but whole."""
    first, *rest = [
        line
        for line in texts()["Containerfile.dockerignore"].split("\n")
        if line and not line.startswith("#")
    ]
    assert first == "*"
    sent = {line[1:] for line in rest if line.startswith("!")}
    copied = {
        word
        for instruction, words in INSTRUCTIONS
        if instruction == "COPY" and "--from=" not in words
        for word in words.split()[:-1]
        if not word.startswith("--")
    }
    assert all(any(Path(word).is_relative_to(path) for path in sent) for word in copied)
    assert all(any(Path(word).is_relative_to(path) for word in copied) for path in sent)


def test_what_is_copied_is_enough_to_build_the_package() -> None:
    """The files that pyproject.toml names, and the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = " ".join(w[1] for w in INSTRUCTIONS if w[0] == "COPY").split()
    needed = {"pyproject.toml", "README.md", *project["project"]["license-files"]}
    assert needed | set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= set(
        copied
    )
    runs = [w[1] for w in INSTRUCTIONS if w[0] == "RUN"]
    assert any('pip install --no-cache-dir "/src[stores]"' in run for run in runs)


def test_the_image_runs_as_a_user_without_rights() -> None:
    """By number, so that an orchestrator can see that it is not root."""
    users = [at for at, words in enumerate(INSTRUCTIONS) if words[0] == "USER"]
    assert INSTRUCTIONS[users[-1]][1] == "10001:10001"
    assert stage_of(users[-1]) == 2
    after = {words[0] for words in INSTRUCTIONS[users[-1] :]}
    assert not after & {"RUN", "COPY"}


def test_the_variables_of_the_image_are_settings() -> None:
    """DLM_SERVER_<FIELD> for fields that there are, with values that they take."""
    given = {k: v for k, v in environment().items() if k.startswith("DLM_SERVER_")}
    names = {name.removeprefix("DLM_SERVER_").lower() for name in given}
    assert {"host", "port", "metrics_host", "metrics_port"} <= names <= SETTINGS
    exposed = next(w[1] for w in INSTRUCTIONS if w[0] == "EXPOSE").split()
    assert exposed == [given["DLM_SERVER_PORT"], given["DLM_SERVER_METRICS_PORT"]]


def test_kernels_are_compiled_for_the_processor_that_they_run_on() -> None:
    """Both stages name the same one; another name is another compilation, at each start."""
    lines = [words[1] for words in INSTRUCTIONS if words[0] == "ENV"]
    targets = [re.findall(r"NUMBA_CPU_\w+=\S+", line) for line in lines]
    assert len(targets) == 2
    assert targets[0] == targets[1] != []
    assert texts()["container/start"].count("/opt/dlm/kernels") == 2
    assert "compile && chmod --recursive a+rX /opt/dlm/kernels\n" in texts()["Containerfile"]
    assert "NUMBA_CACHE_DIR=/opt/dlm/kernels" in lines[0]


class _Probed(BaseHTTPRequestHandler):
    """A metrics port that is ready."""

    def do_GET(self) -> None:
        """See `BaseHTTPRequestHandler`."""
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_the_probe_of_the_image_asks_this_container_whatever_proxy_is_named() -> None:
    """An exec form, of the interpreter that is there; builders pass proxy variables on."""
    line = next(w[1] for w in INSTRUCTIONS if w[0] == "HEALTHCHECK")
    command = json.loads(line[line.index("[") :])
    assert command[:2] == ["python", "-c"]
    with HTTPServer(("127.0.0.1", 0), _Probed) as server, ConnectProxy() as proxy:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environ = {"DLM_SERVER_METRICS_PORT": str(server.server_port), "http_proxy": proxy.url}
        done = subprocess.run([sys.executable, *command[1:]], env=environ, check=False)
        server.shutdown()
    assert done.returncode == 0
    assert not proxy.received


def test_start_gives_the_command_a_copy_of_the_kernels(tmp_path: Any) -> None:
    """Kernels of another image, left in the folder, are gone; the first error ends it."""
    built, cache = tmp_path / "built", tmp_path / "cache"
    for folder, name in ((built, "new.nbi"), (cache, "old.nbi")):
        folder.mkdir()
        (folder / name).touch()
    script = texts()["container/start"].replace("/opt/dlm/kernels", str(built))
    assert "\nset -eu\n" in script
    done = subprocess.run(
        ["sh", "-c", script, "start", "echo", "a b", "c"],
        env={"NUMBA_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "a b c\n"
    assert [path.name for path in cache.iterdir()] == ["new.nbi"]


def test_compose_is_in_order() -> None:
    """No service has a right that it could do without; every volume, network and dependency is
    there."""
    for name, service in COMPOSE["services"].items():
        assert not service.keys() & RIGHTS, name
        if service["image"].startswith("dlm:"):
            assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
            assert service["security_opt"] == ["no-new-privileges:true"], name
        assert re.fullmatch("[a-z0-9./-]+:[^:]+", service["image"]), name
        assert set(service["networks"]) <= COMPOSE["networks"].keys(), name
        assert set(service.get("depends_on", ())) <= COMPOSE["services"].keys(), name
        for volume in service.get("volumes", ()):
            source = volume.split(":/")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), volume
            elif not source.startswith("${"):
                assert source in COMPOSE["volumes"], volume
        if "build" in service:
            assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).exists()
            assert service["image"] == f"dlm:{__version__}"


def test_what_compose_starts_comes_back_and_is_not_reached_from_outside() -> None:
    """After a restart of the machine too, unless it was stopped; no port of a shard is published,
    since shards there let in everybody."""
    for name, service in COMPOSE["services"].items():
        if "profiles" not in service:
            assert service["restart"] == "unless-stopped", name
        if name.startswith("shard-"):
            assert "ports" not in service
            assert service["environment"]["DLM_SERVER_INSECURE"] == "true"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_shards_of_compose_serve_one_shard_each_and_are_where_clients_look() -> None:
    """Shard i in service shard-i, at the address of cluster.toml, scraped by Prometheus."""
    endpoints = ClusterToml(DEPLOY / "cluster.toml").servers()
    port = environment()["DLM_SERVER_PORT"]
    assert [(e.address, e.shard) for e in endpoints] == [
        (f"shard-{index}:{port}", index) for index in range(len(SHARDS))
    ]
    for index in range(len(SHARDS)):
        assert SHARDS[f"shard-{index}"]["command"][-2:] == ["--shard", str(index)]
    scraped = load("prometheus/prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    metrics = environment()["DLM_SERVER_METRICS_PORT"]
    assert scraped == [f"shard-{index}:{metrics}" for index in range(len(SHARDS))]


def test_a_server_takes_the_settings_that_compose_gives() -> None:
    """Those that it has already; and it ends before it is killed."""
    for service in SHARDS.values():
        given = environment() | service["environment"]
        assert {
            name.removeprefix("DLM_SERVER_").lower()
            for name in given
            if name.startswith("DLM_SERVER_")
        } <= SETTINGS
        local = {"DLM_SERVER_HOST": "127.0.0.1"}
        config = resolve(ServerConfig, "server", environ=given | local)
        assert config.preload
        assert config.drain_grace_s + config.shutdown_timeout_s < int(
            service["stop_grace_period"][:-1]
        )


@pytest.mark.promise("secrets_refused")
@pytest.mark.parametrize("name", sorted(texts()))
def test_no_file_holds_a_secret(name: str) -> None:
    """No key, and nothing that looks like a token or a password with a value."""
    text = texts()[name]
    assert "PRIVATE KEY" not in text
    assert not re.search(r"(?i)(password|passwd|secret_key|api_key)\s*[:=]\s*[\"']?\w{6,}", text)
    assert not re.search(r"(?<![0-9a-f])[0-9a-f]{40,}(?![0-9a-f])", text)
