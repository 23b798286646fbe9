"""dlm.gateway.http: what the door by HTTP takes from strangers, on raw connections."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from cluster import WAIT_S, until
from dlm.gateway.calls import LARGE
from gateway.gateways import ThreadGateway

SCORE = "/dlm.v1.LanguageModel/Score"
HEAD = f"POST {SCORE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
MOST = 4096  # bytes of a request
BODY = b'{"sentences": ["a b"]}'


@pytest.fixture(scope="module")
def gateway(opening: Any) -> Iterator[ThreadGateway]:
    """One that takes small requests and few connections."""
    with ThreadGateway(opening, max_message_bytes=MOST, max_connections=16) as running:
        yield running


class Raw:
    """A connection by HTTP/1.1, byte by byte."""

    def __init__(self, gateway: ThreadGateway) -> None:
        self.socket = socket.create_connection(
            ("127.0.0.1", gateway.running.http_port), timeout=WAIT_S
        )
        self._unread = b""

    def send(self, data: bytes) -> Raw:
        """Sends bytes as they are."""
        self.socket.sendall(data)
        return self

    def request(
        self,
        body: bytes = BODY,
        *headers: str,
        target: str = SCORE,
        method: str = "POST",
        host: str = "localhost",
    ) -> Raw:
        """Sends a request with a body of JSON."""
        head = [f"{method} {target} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
        if not any(one.lower().startswith("content-type") for one in headers):
            head.append("Content-Type: application/json")
        return self.send("\r\n".join([*head, *headers, "", ""]).encode() + body)

    def reply(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next response."""
        while b"\r\n\r\n" not in self._unread:
            self._unread += self._more()
        head, _, rest = self._unread.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = int(headers.get("content-length", 0))
        while len(rest) < length:
            rest += self._more()
        self._unread = rest[length:]
        return int(first.split()[1]), headers, rest[:length]

    def refused(self) -> tuple[int, str]:
        """Status and reason of the next response."""
        status, _, body = self.reply()
        return status, json.loads(body)["reason"]

    def _more(self) -> bytes:
        data = self.socket.recv(65536)
        assert data, "the connection ended"
        return data

    def is_closed(self) -> bool:
        """Whether the other end has closed; waits for it."""
        try:
            return not self.socket.recv(65536)
        except ConnectionError:
            return True

    def close(self) -> None:
        """Closes it."""
        self.socket.close()


@pytest.fixture
def connect(gateway: ThreadGateway) -> Iterator[Any]:
    """Opens connections; closes them with the test."""
    made: list[Raw] = []

    def begin() -> Raw:
        made.append(Raw(gateway))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def test_a_connection_takes_request_after_request(connect: Any) -> None:
    """Sent one by one, byte by byte, and two at once; numbers parse back to the float32."""
    raw = connect()
    raw.request()
    status, headers, first = raw.reply()
    assert (status, headers["content-type"]) == (200, "application/json")
    assert "access-control-allow-origin" not in headers
    raw.request().request()
    assert [raw.reply()[2], raw.reply()[2]] == [first, first]
    (score,) = json.loads(first)["scores"]
    values = np.array(score["log10Probs"], np.float32)
    assert score["log10Prob"] == float(values.sum(dtype=np.float64))
    assert [str(value) for value in values] == [str(np.float32(v)) for v in score["log10Probs"]]
    for byte in HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY:
        raw.send(bytes([byte]))
    assert raw.reply()[2] == first


@pytest.mark.promise("gateway_bounds")
@pytest.mark.parametrize(
    ("target", "method", "headers", "status"),
    [
        ("/../../etc/passwd", "GET", [], 404),
        ("/%2e%2e/%2e%2e/etc/passwd", "GET", [], 404),
        ("/openapi.json/../../pyproject.toml", "GET", [], 404),
        ("/dlm.v1.LanguageModel/__init__", "POST", [], 404),
        ("/dlm.v1.LanguageModel/ExtendStream", "POST", [], 404),
        ("/dlm.v1.Shard/Score", "POST", [], 404),
        (SCORE, "GET", [], 405),
        (SCORE, "PUT", [], 405),
        (SCORE, "OPTIONS", ["Origin: http://elsewhere.example"], 405),
        (SCORE, "POST", ["Content-Type: text/plain"], 415),
        (SCORE, "POST", ["Content-Type: application/x-www-form-urlencoded"], 415),
        (SCORE, "POST", ["Content-Encoding: gzip"], 415),
        ("/openapi.json", "GET", [], 200),
        ("/openapi.json?x=1", "HEAD", [], 200),
    ],
)
def test_only_known_paths_are_answered(
    connect: Any, target: str, method: str, headers: list[str], status: int
) -> None:
    """No path leads to a file, and no form or script of another site can ask."""
    raw = connect()
    raw.request(b"" if method in ("GET", "HEAD") else BODY, *headers, target=target, method=method)
    if method == "HEAD":
        assert raw.socket.recv(65536).startswith(b"HTTP/1.1 200 ")
        return
    found, said, body = raw.reply()
    assert found == status
    assert "access-control-allow-origin" not in said
    assert said.get("allow") == ("post" if status == 405 else None)
    assert status == 200 or json.loads(body)["message"]


@pytest.mark.promise("gateway_bounds")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("elsewhere.example:8080", 403),
        ("localhost.elsewhere.example", 403),
        ("[::1", 403),
        ("localhost:8080", 200),
        ("[::1]:8080", 200),
        ("192.0.2.1", 200),
    ],
)
def test_a_name_that_another_site_gave_this_machine_is_not_answered(
    connect: Any, host: str, status: int
) -> None:
    """A page of that site would read the answer."""
    assert connect().request(host=host).reply()[0] == status
    assert connect().request(b"", target="/", method="GET", host=host).reply()[0] == status


def test_any_name_is_answered_where_callers_need_a_token(opening: Any, tokens: Path) -> None:
    """Which a page of another site lacks; or where every machine may ask."""
    for config, status in ({"tokens": str(tokens)}, 401), ({"insecure": True}, 200):
        with ThreadGateway(opening, **config) as gateway:
            raw = Raw(gateway)
            assert raw.request(host="gateway.example").reply()[0] == status
            raw.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"sentences": "a"}',
        b'{"sentence": ["a"]}',
        b'{"sentences": [NaN]}',
        b'{"bos": 1}',
        b'{"ids": [{"ids": [-1]}]}',
        b"[" * 2000,
        b'{"ids": ' * 200,
    ],
)
def test_what_is_no_request_is_refused(connect: Any, body: bytes) -> None:
    """With its reason; the connection goes on."""
    raw = connect()
    assert raw.request(body).refused() == (400, "MALFORMED")
    assert raw.request().reply()[0] == 200


def test_a_body_may_come_in_chunks_and_the_connection_goes_on(connect: Any) -> None:
    """Each of a byte, with an extension, and trailers after the last."""
    raw = connect()
    whole = raw.request().reply()[2]
    chunks = b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in BODY)
    for _ in range(2):
        raw.send(HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + chunks + b"0\r\nA: b\r\n\r\n")
        assert raw.reply()[::2] == (200, whole)


@pytest.mark.parametrize(
    "data",
    [
        b"5\r\n{",
        b"x\r\n{}\r\n0\r\n\r\n",
        b"1\r\n{}\r\n0\r\n\r\n",
        b"1" * 9 + b"\r\n",
        b"-1\r\n",
        b"1\r\n{\r\n" * 4000,
        b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 4000,
        b"2\r\n{}\r\n0\r\nA: b\n\nHEAD / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_body_that_is_cut_off_is_refused(connect: Any, data: bytes) -> None:
    """Chunks that are none, too small or without an end, and trailers that are none or endless."""
    raw = connect()
    raw.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + data)
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.refused() == (400, "MALFORMED")


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("Extend", b'{"states": ["@@@@"], "words": ["a"]}'),
        ("NextWords", b'{"state": "!"}'),
        ("NextWords", b'{"state": "=="}'),
        ("Extend", b'{"states": ["", "AA!A"], "words": ["a"]}'),
    ],
)
def test_a_state_that_is_no_base64_is_refused(connect: Any, call: str, body: bytes) -> None:
    """It would begin a sentence."""
    asked = connect().request(body, target=SCORE.replace("Score", call))
    assert asked.refused() == (400, "MALFORMED")


@pytest.mark.parametrize("work", ["Parse", "MessageToJson"])
def test_others_are_answered_while_much_json_is_read_or_written(
    opening: Any, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """A call of thousands of words takes the time of a thousand calls."""
    begun, answered, convert = threading.Event(), threading.Event(), getattr(json_format, work)

    def slowly(given: Any, *rest: Any, **more: Any) -> Any:
        if len(given if work == "Parse" else given.SerializeToString()) > LARGE:
            begun.set()
            assert answered.wait(WAIT_S)
        return convert(given, *rest, **more)

    monkeypatch.setattr(json_format, work, slowly)
    with ThreadGateway(opening, deadline_s=60.0) as gateway:
        slow, quick = Raw(gateway), Raw(gateway)
        slow.request(b'{"ids": [{"ids": [1%s]}]}' % (b",1" * LARGE))
        assert begun.wait(WAIT_S)
        assert quick.request().reply()[0] == 200
        answered.set()
        status, _, answer = slow.reply()
        assert status == 200 and len(json.loads(answer)["scores"][0]["log10Probs"]) == LARGE + 2
        slow.close()
        quick.close()


@pytest.mark.promise("gateway_bounds")
def test_a_large_body_is_refused_unread(connect: Any) -> None:
    """One that says so, one that does not, and one that waits to be asked for it."""
    raw = connect()
    raw.send(HEAD + b"Content-Length: 1000000000\r\nExpect: 100-continue\r\n\r\n")
    status, headers, body = raw.reply()
    assert (status, headers["connection"]) == (400, "close")
    assert json.loads(body)["reason"] == "TOO_MANY_QUERIES"
    chunked = connect()
    chunked.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    chunked.send((b"1000\r\n" + b" " * 0x1000 + b"\r\n") * 3)
    assert chunked.reply()[0] == 400
    asked = connect()
    asked.send(HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(BODY))
    assert asked.reply()[0] == 100
    assert asked.send(BODY).reply()[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 20_000,
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\nHost: localhost\n\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA:" + b" " * 16_000 + b"\0\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: +2\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_http_ends_its_connection(connect: Any, data: bytes) -> None:
    """With an error's status, and the next connection is answered."""
    raw = connect()
    status = raw.send(data).reply()[0]
    assert 400 <= status <= 505
    assert raw.is_closed()
    assert connect().request().reply()[0] == 200


@pytest.mark.promise("gateway_bounds")
def test_a_head_that_never_ends_is_not_waited_for(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are a body, whose caller is told, and a first byte."""
    monkeypatch.setattr("dlm.wire.http.HEAD_S", 0.05)
    monkeypatch.setattr("dlm.wire.http.BODY_S", 0.05)
    silent, slow = connect(), connect().send(b"GET / HTTP/1.1\r\n")
    body = connect().send(HEAD + b"Content-Length: 9\r\n\r\n{")
    assert body.reply()[0] == 504
    assert all(one.is_closed() for one in (silent, slow, body))


@pytest.mark.promise("gateway_bounds")
def test_an_answer_that_nobody_reads_ends_its_connection(
    connect: Any, gateway: ThreadGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where more answers are asked for than the system keeps; others are answered."""
    monkeypatch.setattr("dlm.wire.http.WRITE_S", 0.05)
    until(lambda: len(gateway.running.metrics.connections) == 0)
    slow = connect()
    slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({"ids": [{"ids": [1] * 16_000}]}).encode()

    def ask() -> None:
        with contextlib.suppress(OSError):  # it is closed meanwhile
            for _ in range(50):
                slow.request(body)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    until(lambda: len(gateway.running.metrics.connections) == 0)
    assert connect().request().reply()[0] == 200


def test_the_longest_idle_connection_makes_room(connect: Any, gateway: ThreadGateway) -> None:
    """Beyond `max_connections`; those that have asked meanwhile stay."""
    until(lambda: len(gateway.running.metrics.connections) == 0)
    idle = [connect() for _ in range(16)]
    until(lambda: len(gateway.running.metrics.connections) == 16)
    assert idle[0].request().reply()[0] == 200  # so it is idle since now
    assert connect().request().reply()[0] == 200
    assert idle[1].is_closed()
    assert idle[0].request().reply()[0] == 200


def test_chunks_whose_lines_end_otherwise_are_refused_at_once(connect: Any) -> None:
    """A line feed alone ends none; the rest is not waited for."""
    for data in (b"2\n{}\n0\n\n", b"2\r\n{}\r\n0\r\nA: b\n\n"):
        raw = connect().send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + data)
        assert raw.refused() == (400, "MALFORMED")


def test_a_call_in_flight_makes_room_for_none(connect: Any, gateway: ThreadGateway) -> None:
    """Those whose answer is there do; where all are at work, a further connection is closed."""
    until(lambda: len(gateway.running.metrics.connections) == 0)
    answered = connect()
    answered.send(b"GET / HTTP/1.0\r\n\r\n")  # the gateway waits for its end
    assert answered.reply()[0] == 200
    half = HEAD + b"Content-Length: %d\r\n\r\n{" % len(BODY)
    working = [connect().send(half) for _ in range(15)]
    until(lambda: len(gateway.running.metrics.connections) == 16)
    working.append(connect().send(half))
    assert answered.is_closed()
    until(lambda: sum(1 for _ in gateway.running._http._connections.idle) == 0)
    assert connect().is_closed()
    for one in working:
        assert one.send(BODY[1:]).reply()[0] in (200, 429)


def test_a_client_that_goes_away_is_no_fault(
    connect: Any, gateway: ThreadGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a body, or with answers unread; nothing is logged as an error."""
    page = b"GET /page.js HTTP/1.1\r\nHost: a\r\n\r\n"
    for sent in (HEAD + b"Content-Length: 9\r\n\r\n{", page * 50):
        for _ in range(5):
            raw = connect().send(sent)
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.close()
    until(lambda: len(gateway.running.metrics.connections) == 0)
    assert connect().request().reply()[0] == 200
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == []


def test_random_requests_are_answered_or_refused(connect: Any, gateway: ThreadGateway) -> None:
    """Bits of a good request changed, in the body and in the head; then a good one."""
    rng = np.random.default_rng(5)
    good = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    for _ in range(200):
        data = bytearray(good)
        for at in rng.integers(0, len(data), 3):
            data[at] ^= 1 << int(rng.integers(8))
        raw = Raw(gateway)
        raw.send(bytes(data))
        raw.socket.shutdown(socket.SHUT_WR)
        while raw.socket.recv(65536):
            pass
        raw.close()
    assert connect().request().reply()[0] == 200
