"""dlm.gateway.http: the page in a browser's eyes."""

from __future__ import annotations

import http.client
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import dlm.gateway
from cluster import WAIT_S
from gateway.gateways import Caller, ThreadGateway

FOLDER = Path(dlm.gateway.__file__).parent / "page"

# A browser's parts that the page uses: elements that hold what is put into them.
BROWSER = """
const elements = {};
class Element {
  constructor() { this.value = ""; this.textContent = ""; this.hidden = false; this.children = []; }
  append(...more) { this.children.push(...more); }
  replaceChildren(...all) { this.children = all; }
  addEventListener() {}
  text() { return this.textContent + this.children.map((one) => " " + one.text()).join(""); }
}
globalThis.document = {
  getElementById: (id) => (elements[id] ??= new Element()),
  createElement: () => new Element(),
};
globalThis.setInterval = () => {};
const real = globalThis.fetch;
globalThis.fetch = (path, more) => real(process.argv[1] + path, more);
document.getElementById("sentence").value = process.argv[2];
process.on("exit", () => {
  for (const id in elements) console.log(id + ":" + elements[id].text());
});
"""


def test_the_page_takes_nothing_from_elsewhere(gateway: ThreadGateway) -> None:
    """Nor would a browser let it, nor run a script inside it; all it names is served."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.running.http_port)
    texts = {}
    waiting = ["/"]
    while waiting:
        path = waiting.pop()
        connection.request("GET", path)
        answer = connection.getresponse()
        texts[path] = answer.read().decode()
        assert answer.status == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        named = re.findall(r"(?:src|href)=\"([^\"]*)\"", texts[path])
        waiting += [f"/{name}" for name in named if f"/{name}" not in texts]
    connection.close()
    assert texts.keys() == {"/", "/page.js", "/page.css"}
    assert not re.search(r"https?:|//[a-z]|@import|url\(|innerHTML|style=", "".join(texts.values()))
    assert re.search(r"<html lang=", texts["/"])
    for name in re.findall(r"<(?:input|textarea) id=\"(\w+)\"", texts["/"]):
        assert f'<label for="{name}">' in texts["/"]


def test_the_page_shows_what_the_gateway_answers(
    gateway: ThreadGateway, callers: dict[str, Caller]
) -> None:
    """Each word with its score and order, the likeliest next words, the model and its servers."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    script = BROWSER + (FOLDER / "page.js").read_text()
    url = f"http://127.0.0.1:{gateway.running.http_port}"
    line = ["node", "-e", script, url, "lacking <script>"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    shown = dict(one.split(":", 1) for one in done.stdout.splitlines())
    assert shown["problem"] == ""
    score = callers["grpc"]("Score", sentences=["lacking <script>"]).scores[0]
    for word, order in zip(["lacking", "<script>"], score.matched_orders, strict=False):
        assert f"{word}  (unknown)" in shown["words"]
        assert f" {order}-gram" in shown["words"]
    first = callers["grpc"]("NextWords", text="lacking <script>").words[0]
    assert shown["next"].split()[0] == first.word
    assert "order 4" in shown["model"]
    assert shown["servers"].split().count("yes") == 2
