"""What GET returns: the page, and the contract for tools. No path of a caller names a file."""

from __future__ import annotations

from importlib import resources

from dlm.gateway.http import Answer

# A browser fetches nothing from elsewhere, runs no script in the page, and shows it in no frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (("Content-Security-Policy", POLICY), ("Referrer-Policy", "no-referrer"))
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}


def pages() -> dict[str, Answer]:
    """Path -> the answer, read once."""
    folder = resources.files("dlm.gateway") / "page"
    found = {
        path: Answer(200, (folder / name).read_bytes(), kind, HEADERS)
        for path, (name, kind) in FILES.items()
    }
    contract = resources.files("dlm.wire._pb") / "lm.openapi.json"
    return {**found, "/openapi.json": Answer(200, contract.read_bytes())}
