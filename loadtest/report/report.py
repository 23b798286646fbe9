"""Makes a run's report from its records, with no side effects; a killed run's journal suffices.
`report.schema.json` describes each field."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from dlm.client.metrics import OK
from dlm.errors import FormatError
from loadtest.run.latency import Latencies
from loadtest.run.replay import LOAD_ENDED, Record

FORMAT, VERSION = "dlm load test report", 1
BOTTLENECK = 0.10  # share of a process's CPU time above which its driver is a bottleneck
ID_DIGITS = 12  # hex digits of the ids of models and shard sets in servers' states

Report = dict[str, Any]


def imbalance(values: Sequence[float]) -> float | None:
    """(max - avg) / avg (DLM 4.2.3); None if there is nothing to balance."""
    total = sum(values)
    return max(values) * len(values) / total - 1 if total else None


def build(records: Iterable[Record]) -> Report:
    """Makes the report of a run.

    Args    records  in order; the first is the header, the last says why the run ended, if known
    Raises  FormatError  no header, or no client was ready: nothing was measured
    """
    by_type: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_type[record.get("type", "")].append(record)
    if not by_type["header"] or not by_type["ready"]:
        raise FormatError(
            "the records have no header or no ready client: nothing was measured; run the load "
            "test again"
        )
    header, ready = by_type["header"][0], by_type["ready"]
    window_s, load = header["window_s"], header["load"]
    looks = _looks(by_type["servers"], ready[0]["shard_set"][:ID_DIGITS])
    numbers = sorted({record["window"] for record in by_type["window"]})
    windows: list[_Merged] = []
    warmup: list[_Merged] = []
    for number in numbers:
        parts = [record for record in by_type["window"] if record["window"] == number]
        length = window_s
        if number >= 0:
            length = min(window_s, load["seconds"] - number * window_s)
        (windows if number >= 0 else warmup).append(_Merged(number * window_s, length, parts))
    total = _Merged(0.0, sum(w.seconds for w in windows), [p for w in windows for p in w.parts])
    ended = by_type["end"][-1]["why"] if _has_end(by_type) else "the run was killed"
    measured = [look for look in looks if look["at_s"] > window_s / 2]
    return {
        "format": FORMAT,
        "version": VERSION,
        "ended": ended,
        "complete": ended == LOAD_ENDED,
        "provenance": header["provenance"],
        "trace": header["trace"],
        "load": load,
        "clients": header["clients"],
        "target": _target(ready[0]),
        "warmup": {"seconds": load["warmup_s"], "requests": sum(w.sent for w in warmup)},
        "results": {**total.facts(), **total.curves(), **_server_totals(measured)},
        "errors": total.errors(),
        "checked": _checked(by_type["checked"]),
        "balance": _balance(ready[0]["shard_bytes"], measured),
        "driver": _driver(ready, total),
        "steps": _steps(load, windows),
        "window_s": window_s,
        "windows": [{**w.facts(), **_servers_at(looks, w), **_target_rate(load, w)}
                    for w in windows],
        "modes": _modes([*warmup, *windows]),
        "faults": [{n: one[n] for n in ("at_s", "command", "what")} for one in by_type["fault"]],
        "stretches": _stretches(by_type["fault"], windows),
        "servers": _servers(measured),
    }  # fmt: skip


def _has_end(by_type: dict[str, list[Record]]) -> bool:
    return any("why" in record for record in by_type["end"])


class _Merged:
    """Merges the records of all clients for some windows."""

    def __init__(self, begin_s: float, seconds: float, parts: list[Record]) -> None:
        self.begin_s, self.seconds, self.parts = begin_s, seconds, parts
        self.sent = sum(part["requests"] for part in parts)
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        for part in parts:
            self.counts.update(part["counts"])
            self.outcomes.update(part["outcomes"])
            self.sources.update(part["sources"])
        self.audio_s = sum(part["audio_s"] for part in parts)
        self.call_s = sum(part["call_s"] for part in parts)

    def histogram(self, name: str) -> Latencies:
        merged = Latencies()
        for part in self.parts:
            merged.merge(Latencies.decode(part[name]))
        return merged

    def curves(self) -> Report:
        """Percentiles at which the value changes, thinned to what a plot can show."""
        return {
            f"{name}_curve": _thinned(self.histogram(name).curve())
            for name in ("latency", "service")
        }

    def errors(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for part in self.parts:
            for outcome, text in part["errors"].items():
                found.setdefault(outcome, text)
        return found

    @property
    def mode(self) -> str | None:
        """The cascade's mode: local_fallback as soon as one client uses its local fallback."""
        modes = {part["mode"] for part in self.parts} - {None}
        return None if not modes else "local_fallback" if "local_fallback" in modes else "full"

    def facts(self) -> Report:
        """The facts of `measured` in report.schema.json."""
        n, counts = self.sent, self.counts
        answered = self.outcomes[OK]
        failed = n - answered
        return {
            "begin_s": self.begin_s,
            "seconds": self.seconds,
            "requests": n,
            "answered": answered,
            "failed": failed,
            "failed_share": _per(failed, n),
            "outcomes": dict(self.outcomes),
            "sources": dict(self.sources),
            "bigram_fallback_share": _per(self.sources["bigram_fallback"], self.sources.total()),
            "local_fallback_share": _per(self.sources["local_fallback"], self.sources.total()),
            "requests_per_s": _per(n, self.seconds),
            "answered_per_s": _per(answered, self.seconds),
            "audio_s": self.audio_s,
            "audio_s_per_s": _per(self.audio_s, self.seconds),
            "messages": counts["messages"],
            "messages_failed": counts["failed"],
            "messages_per_audio_s": _per(counts["messages"], self.audio_s),
            "messages_per_minute": _per(60 * counts["messages"], self.seconds),
            "queries": counts["queries"],
            "queries_per_audio_s": _per(counts["queries"], self.audio_s),
            "queries_per_message": _per(counts["sent_queries"], counts["messages"]),
            "local_hits_share": _per(counts["local_hits"], counts["queries"]),
            "query_time_per_audio_s": _per(self.call_s, self.audio_s),
            "latency": self.histogram("latency").facts(),
            "service": self.histogram("service").facts(),
            "late": self.histogram("late").facts(),
            "client_cpu_s": counts["cpu_s"],
            "client_cores": _per(counts["cpu_s"], self.seconds),
            "client_cpu_us_per_request": _per(1e6 * counts["cpu_s"], n),
            "bytes_sent": counts["bytes_sent"],
            "bytes_received": counts["bytes_received"],
            "bytes_per_audio_s": _per(
                counts["bytes_sent"] + counts["bytes_received"], self.audio_s
            ),
            "mode": self.mode,
        }


def _thinned(curve: list[tuple[float, float]]) -> list[list[float]]:
    """Keeps points whose shares of slower requests are >= 0.01 apart in log10, and the last one."""
    kept: list[list[float]] = []
    place = -1.0
    for percent, value in curve:
        here = 9.0 if percent >= 100 else -math.log10(1 - percent / 100)
        if here >= place + 0.01 or percent >= 100:
            kept.append([round(percent, 6), value])
            place = here
    return kept


def _per(count: float, of: float) -> float | None:
    return count / of if of else None


def _looks(records: list[Record], shard_set: str) -> list[Report]:
    """Polls of the servers since time 0, each with the changes since the previous one."""
    found: list[Report] = []
    before_s: float | None = None
    machine: Report | None = None
    for record in records:
        at_s, then = record["at_s"], machine
        machine = record.get("machine")
        if at_s is not None and before_s is not None:
            passed_s = at_s - before_s
            rows = [
                {
                    "address": row["address"],
                    "shard": row["shard"],
                    "state": row["state"],
                    "messages": (row["messages_per_s"] or 0.0) * passed_s
                    if row["shard_set"] == shard_set
                    else 0.0,
                    "cpu_s": (row["cpu_percent"] or 0.0) / 100 * passed_s,
                    "memory_bytes": row["memory_bytes"],
                }
                for row in record["servers"]
            ]
            found.append(
                {
                    "at_s": at_s,
                    "seconds": passed_s,
                    "servers": rows,
                    "busy_s": machine["busy_s"] - then["busy_s"] if machine and then else 0.0,
                    "total_s": machine["total_s"] - then["total_s"] if machine and then else 0.0,
                }
            )
        before_s = at_s
    return found


def _servers(looks: list[Report]) -> list[Report]:
    """Each server process: its answers and resources while it was polled, and its last state."""
    found: dict[str, Report] = {}
    for look in looks:
        for row in look["servers"]:
            known = found.setdefault(row["address"], {"messages": 0.0, "cpu_s": 0})
            known.update({**row, **{n: known[n] + row[n] for n in ("messages", "cpu_s")}})
    return [{**one, "messages": round(one["messages"])} for one in found.values()]


def _server_totals(looks: list[Report]) -> Report:
    by_process: Counter[str] = Counter()
    for look in looks:
        for row in look["servers"]:
            by_process[row["address"]] += row["cpu_s"]
    seconds = sum(look["seconds"] for look in looks)
    cpu_s = float(by_process.total())
    return {
        "server_cpu_s": cpu_s,
        "server_cores": _per(cpu_s, seconds),
        "busiest_server_cores": _per(max(by_process.values(), default=0.0), seconds),
        "machine_cpu_share": _machine_share(looks),
    }


def _machine_share(looks: list[Report]) -> float | None:
    return _per(sum(look["busy_s"] for look in looks), sum(look["total_s"] for look in looks))


def _servers_at(looks: list[Report], window: _Merged) -> Report:
    """Cores that servers used around a window; None if they were not polled."""
    for look in looks:
        middle = look["at_s"] - look["seconds"] / 2
        if window.begin_s <= middle < window.begin_s + window.seconds:
            cpu_s = sum(row["cpu_s"] for row in look["servers"])
            silent = sum(row["state"] != "ready" for row in look["servers"])
            return {
                "server_cores": _per(cpu_s, look["seconds"]),
                "servers_not_ready": silent,
                "machine_cpu_share": _machine_share([look]),
            }
    return {"server_cores": None, "servers_not_ready": None, "machine_cpu_share": None}


def _target_rate(load: Report, window: _Merged) -> Report:
    """Requests per second planned for the middle of a window; None for a closed loop."""
    at_s = window.begin_s + window.seconds / 2
    for one in load["segments"]:
        if at_s < one["seconds"]:
            return {"target_per_s": one["per_s"]}
        at_s -= one["seconds"]
    return {"target_per_s": None}


def _target(ready: Record) -> Report:
    names = ("model", "shard_set", "order", "encoding", "vocabulary_size", "ngrams", "shard_bytes")
    return {name: ready[name] for name in names}


def _balance(shard_bytes: list[int], looks: list[Report]) -> Report:
    messages = [0.0] * len(shard_bytes)
    for look in looks:
        for row in look["servers"]:
            if row["shard"] is not None and row["shard"] < len(messages):
                messages[row["shard"]] += row["messages"]
    return {
        "bytes": {"per_shard": shard_bytes, "imbalance": imbalance(shard_bytes)},
        "messages": {
            "per_shard": [round(one) for one in messages],
            "imbalance": imbalance(messages),
        },
    }


def _driver(ready: list[Record], total: _Merged) -> Report:
    """The share of the client processes' CPU time spent on planning, sending and counting."""
    cost_us = sum(one["driver_cpu_us"] for one in ready) / len(ready)
    share = _per(cost_us * total.sent / 1e6, total.counts["cpu_s"])
    return {
        "cpu_us_per_request": cost_us,
        "share_of_client_cpu": share,
        "is_bottleneck": share is not None and share > BOTTLENECK,
    }


def _checked(found: list[Record]) -> Report | None:
    """How many answers were compared with the named models' files, and how many differed."""
    if not found:
        return None
    return {name: sum(one[name] for one in found) for name in ("answers", "wrong")}


def _steps(load: Report, windows: list[_Merged]) -> list[Report]:
    segments = load["segments"]
    if len(segments) < 2:
        return []
    ends = list(itertools.accumulate(one["seconds"] for one in segments))
    return [
        {**one, **_between(begin, end, windows).facts()}
        for one, begin, end in zip(segments, [0.0, *ends], ends, strict=False)
    ]


def _between(begin: float, end: float, windows: list[_Merged]) -> _Merged:
    """Merges the windows that lie entirely between two times."""
    inside = [
        w for w in windows if begin <= w.begin_s + 1e-6 and w.begin_s + w.seconds <= end + 1e-6
    ]
    parts = [part for w in inside for part in w.parts]
    return _Merged(begin, sum(w.seconds for w in inside), parts)


def _stretches(faults: list[Record], windows: list[_Merged]) -> list[Report]:
    """Returns the figures of each stretch between faults, with the commands at its beginning."""
    if not faults or not windows:
        return []
    commands: defaultdict[float, list[str]] = defaultdict(list)
    for one in faults:
        commands[one["at_s"]].append(one["command"])
    begins = [0.0, *(at_s for at_s in sorted(commands) if at_s > 0)]
    ends = [*begins[1:], windows[-1].begin_s + windows[-1].seconds]
    return [
        {"after": ", ".join(commands[begin]), **_between(begin, end, windows).facts()}
        for begin, end in zip(begins, ends, strict=True)
    ]


def _modes(windows: list[_Merged]) -> list[Report]:
    """Returns the changes of the cascade's mode, and the end of the window that showed each."""
    found: list[Report] = []
    for window in windows:
        mode = window.mode
        if mode is not None and (not found or found[-1]["mode"] != mode):
            found.append({"at_s": window.begin_s + window.seconds, "mode": mode})
    return found
