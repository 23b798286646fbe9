"""The unit of a shard: it parses, is fenced in, and leaves a shard the time to drain."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from deploy.documents import SETTINGS, fault_of, shell_lines, texts
from dlm.server.config import ServerConfig
from dlm.server.process import BEAT_S, HUNG_S
from dlm.server.security import MAX_FILES

TEXTS = texts()
UNIT = TEXTS["systemd/dlm-shard@.service"]
LINES = re.findall(r"^(\w+)=(.*)$", UNIT, re.M)
ENVIRONMENT = ["systemd/dlm.env", "systemd/1.env"]


def values(name: str) -> list[str]:
    """What a directive is given, each time."""
    return [value for key, value in LINES if key == name]


def test_the_unit_is_sections_comments_and_directives() -> None:
    """A checked list, for machines without systemd."""
    assert re.findall(r"^\[(\w+)\]$", UNIT, re.M) == ["Unit", "Service", "Install"]
    for line in UNIT.split("\n"):
        assert re.fullmatch(r"|#.*|\[\w+\]|[A-Z]\w*=.*", line), line
    repeated = {key for key, _ in LINES if len(values(key)) > 1}
    assert repeated == {"EnvironmentFile"}


def test_systemd_agrees(tmp_path: Path) -> None:
    """`systemd-analyze verify`, with a program that is there in the place of dlm."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not on PATH")
    here = tmp_path / "dlm-shard@2.service"
    here.write_text(UNIT.replace("/opt/dlm/bin/dlm", shutil.which("true") or "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", here], capture_output=True, text=True, check=False
    )
    said = [line for line in done.stderr.split("\n") if "dlm-shard" in line]
    assert said == []
    assert done.returncode == 0, done.stderr


def test_a_stop_before_the_server_is_ready_is_not_a_failure() -> None:
    """`dlm serve` ends with that status then (test_ended.py), and 0 once it serves."""
    assert values("SuccessExitStatus") == [str(128 + signal.SIGTERM)]


def test_it_may_have_many_connections() -> None:
    """Soft and hard limit are one number: what the server itself raises the soft one to is there.
    A distribution's 1,024 would be full with the connections of a few hundred decoders."""
    (limit,) = values("LimitNOFILE")
    assert 65_536 <= int(limit) <= MAX_FILES


def test_systemd_hears_that_it_is_ready_and_lives() -> None:
    """Its watchdog has longer than the server itself waits for its loop."""
    assert values("Type") == ["notify"]
    (patience,) = values("WatchdogSec")
    assert int(patience) > HUNG_S + BEAT_S


def test_it_serves_as_many_folders_as_are_named() -> None:
    """systemd splits $NAME at spaces, as a word of its own, and keeps ${NAME} whole: for a roll two
    folders are served."""
    (start,) = values("ExecStart")
    words = start.split()
    assert words[words.index("serve") + 1] == "$DLM_SHARD_SETS"
    at = words.index("$DLM_SHARD_SETS")
    for folders in (["/srv/dlm/one"], ["/srv/dlm/one", "/srv/dlm/two"]):
        given = [*words[1:at], *folders, *words[at + 1 :]]
        assert (
            fault_of(
                ("dlm", *(word.replace("%i", "2").replace("$DLM_SHARD", "2") for word in given))
            )
            is None
        )
    assert "DLM_SHARD_SETS" in TEXTS["runbook.md"]


def test_it_is_killed_only_after_it_could_drain() -> None:
    """SIGTERM, drain_grace_s, shutdown_timeout_s, and time to spare."""
    assert values("KillSignal") == ["SIGTERM"]
    (timeout,) = values("TimeoutStopSec")
    assert int(timeout) >= 2 * (ServerConfig().drain_grace_s + ServerConfig().shutdown_timeout_s)
    assert values("Restart") == ["on-failure"]


def test_it_is_fenced_in() -> None:
    """What a server never needs is closed to it."""
    assert {
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("PrivateTmp", "yes"),
        ("PrivateDevices", "yes"),
        ("RestrictNamespaces", "yes"),
        ("SystemCallFilter", "@system-service"),
        ("RestrictAddressFamilies", "AF_INET AF_INET6 AF_UNIX"),
    } <= set(LINES)


def test_it_may_compile_kernels() -> None:
    """Memory that is written and then run; and a user who is not root."""
    assert values("MemoryDenyWriteExecute") == []
    assert values("User") == ["dlm"]


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_environment_files_name_settings_that_exist(name: str) -> None:
    """Commented ones too; and what the unit reads from them."""
    found = re.findall(r"^#?(\w+)=(.*)$", texts()[name], re.M)
    assert found
    settings = {key.removeprefix("DLM_SERVER_").lower() for key, _ in found} - {
        "dlm_shard_sets",
        "dlm_shard",
    }
    assert settings <= SETTINGS
    assert all(" " not in value and '"' not in value for _, value in found)


def test_what_the_unit_reads_is_given() -> None:
    """Every ${VARIABLE} of ExecStart stands in a file, and the files are those of the folder."""
    for name, file in (("DLM_SHARD_SETS", "dlm"), ("DLM_SHARD", "1")):
        assert name in dict(re.findall(r"^(\w+)=(.*)$", texts()[f"systemd/{file}.env"], re.M))
    named = set(re.findall(r"\$\{?(\w+)", values("ExecStart")[0]))
    assert named == {"DLM_SHARD_SETS", "DLM_SHARD"}
    names = [Path(value.lstrip("-")).name.replace("%i", "1") for value in values("EnvironmentFile")]
    assert names == [Path(name).name for name in ENVIRONMENT]


def test_the_page_makes_what_the_settings_name() -> None:
    """Certificate, key and tokens: each is put where dlm.env looks, secrets for root and the group
    that the unit runs as; and the tokens come from `dlm token`."""
    given = re.findall(
        r"^DLM_SERVER_(?:TLS_CERT|TLS_KEY|TOKENS)=(.*)$", TEXTS["systemd/dlm.env"], re.M
    )
    installs = {
        line.split()[-1]: line for line in shell_lines(TEXTS["hosts.md"]) if "install " in line
    }
    assert len(given) == 3
    for path in given:
        secret = not path.endswith(".crt")
        assert ("--mode=640 --group=dlm" in installs[path]) == secret
        assert ("--mode=644" in installs[path]) != secret
    assert values("Group") == ["dlm"]
    assert any(
        "dlm token" in line and "--tokens tokens" in line for line in shell_lines(TEXTS["hosts.md"])
    )
