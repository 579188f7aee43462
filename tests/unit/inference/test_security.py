"""FAULTS rows 38 and 39: every route x every method x every attack; routes come from the app, so that none is missed."""

from __future__ import annotations

import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from synthetic_runs import make_folder, make_run
from tunesmith.inference.board import Board, RunIndex
from tunesmith.runs.folder import RunDir

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
READING = ("GET", "HEAD")
ROUTES = [(route.path, route.methods) for route in Board(Path(".")).routes()]
ATTACKS = (
    "evil host",
    "no host port",
    "two hosts",
    "no token",
    "wrong token",
    "token of another port",
    "foreign origin",
    "null origin",
    "no origin",
    "other port",
    "cross-site fetch",
    "plain text",
)


def path_of(route: str) -> str:
    path = route.replace("{run}", "alpha").replace("{name}", "board.css")
    return path + ("?run=alpha&run=beta" if path == "/compare" else "")


def attacked(good: dict[str, str], attack: str, port: int) -> dict[str, str]:
    headers = dict(good)
    changes: dict[str, dict[str, str | None]] = {
        "evil host": {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"},
        "no host port": {"Host": "127.0.0.1"},
        "two hosts": {"Host": f"127.0.0.1:{port}, evil.example"},
        "no token": {"Cookie": None},
        "wrong token": {"Cookie": f"tunesmith-{port}=" + "u" * 43},
        "token of another port": {"Cookie": good["Cookie"].replace(str(port), "1")},
        "foreign origin": {"Origin": "http://evil.example"},
        "null origin": {"Origin": "null"},
        "no origin": {"Origin": None},
        "other port": {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
        "cross-site fetch": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        "plain text": {"Origin": "http://evil.example", "Content-Type": "text/plain"},
    }
    for name, value in changes[attack].items():
        if value is None:
            headers.pop(name)
        else:
            headers[name] = value
    return headers


def expected(attack: str, method: str) -> set[int]:
    if "host" in attack:
        return {421}
    if "token" in attack:
        return {401}
    if attack in ("other port", "cross-site fetch") or method not in READING:
        return {403}
    return {200}  # a foreign Origin on a read: the server responds, but the foreign page cannot read the response


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_route_and_method_rejects_attacks(steady, attack: str) -> None:
    checked = 0
    for route, _ in [*ROUTES, ("/no/such/route", None)]:
        for method in METHODS:
            headers = attacked(steady.good(), attack, steady.port)
            status, found, body = steady.ask(method, path_of(route), headers=headers)
            allowed = expected(attack, method)
            if 200 in allowed:
                allowed |= {404, 405}
            assert status in allowed, (route, method, attack, status, body[:200])
            assert "unsafe-inline" not in found["content-security-policy"]
            assert "frame-ancestors 'none'" in found["content-security-policy"]
            assert not [name for name in found if name.startswith("access-control")]
            assert found["x-content-type-options"] == "nosniff"
            assert found["cross-origin-resource-policy"] == "same-origin"
            assert "set-cookie" not in found
            checked += 1
    assert checked == (len(ROUTES) + 1) * len(METHODS)


def test_every_route_accepts_only_its_methods(steady) -> None:
    for route, methods in ROUTES:
        for method in METHODS:
            headers = steady.good() | {"Content-Type": "application/json"}
            status, found, answer = steady.ask(method, path_of(route), headers=headers)
            if method in methods:
                assert status == 200, (route, method, answer[:200])
            else:
                assert status == 405, (route, method)
            if found["content-type"].startswith("text/html"):
                assert "'self'" in found["content-security-policy"] or "sha256-" in found["content-security-policy"]


def test_bearer_token_needs_no_origin(service) -> None:
    headers = {"Host": f"127.0.0.1:{service.port}", "Authorization": "Bearer " + "t" * 43}
    body = b'{"texts": ["a"]}'
    headers["Content-Type"] = "application/json"
    assert service.ask("POST", "/predict", headers=headers, body=body)[0] == 200
    assert service.ask("POST", "/predict", headers=headers | {"Origin": "http://evil.example"}, body=body)[0] == 403


def test_token_url_sets_strict_cookie_and_redirects(served) -> None:
    host = {"Host": f"localhost:{served.port}"}
    status, found, body = served.ask("GET", f"/runs/alpha?token={'t' * 43}&x=1", headers=host)
    assert (status, found["location"], body) == (303, "/runs/alpha?x=1", b"")
    for word in ("HttpOnly", "SameSite=Strict", "Path=/", f"tunesmith-{served.port}="):
        assert word in found["set-cookie"]
    assert served.ask("GET", "/?token=wrong", headers=host)[0] == 401
    status, found, _ = served.ask("GET", f"//evil.example/?token={'t' * 43}", headers=host)
    assert found["location"].startswith("/evil.example")
    assert served.ask("POST", f"/runs/alpha?token={'t' * 43}", headers=host)[0] == 401


TRAVERSALS = (
    "/../secret.txt",
    "/runs/..",
    "/runs/.",
    "/runs/%2e%2e",
    "/runs/%2e%2e/secret.txt",
    "/runs/..%2fsecret.txt",
    "/runs/..%2f..%2fsecret.txt/report",
    "/runs/%2e%2e%2fsecret.txt",
    "/runs/..%5csecret.txt",
    "/runs/..\\secret.txt",
    "/runs//etc/passwd",
    "//etc/passwd",
    "/runs/%00",
    "/runs/alpha%00.txt",
    "/runs/alpha/../../secret.txt",
    "/runs/alpha/journal.jsonl",
    "/runs/secret.txt",
    "/runs/" + "a" * 65,
    "/runs/%252e%252e",
    "/runs/al%70ha%2f..",
    "/runs/Alpha",
    "/runs/",
    "/assets/",
    "/assets/..%2fsecurity.py",
    "/assets/../security.py",
    "/assets/list.html.j2",
    "/assets/%2e%2e/app.py",
    "/compare?run=..&run=alpha",
    "/compare?run=%2e%2e%2fsecret.txt&run=beta",
)


@pytest.mark.parametrize("path", TRAVERSALS)
def test_path_outside_the_folder_is_not_found(steady, path: str) -> None:
    with socket.create_connection(("127.0.0.1", steady.port), timeout=10) as raw:
        lines = [f"GET {path} HTTP/1.1", *(f"{k}: {v}" for k, v in steady.good().items()), "Connection: close", "", ""]
        raw.sendall("\r\n".join(lines).encode())
        answer = b""
        while part := raw.recv(65536):
            answer += part
    assert answer.split(b" ")[1] == b"404", answer[:300]
    assert b"SECRET" not in answer
    assert b"root:" not in answer


def test_request_for_many_ranges_returns_the_full_file(served) -> None:
    ranges = "bytes=" + ",".join(f"{k}-{k}" for k in range(2000))
    status, _, body = served.ask("GET", "/assets/board.css", headers=served.good() | {"Range": ranges})
    assert status == 200
    assert len(body) < 50_000


@pytest.mark.parametrize(
    "linked", ["folder", "journal.jsonl", "predictions.parquet", "run.yaml", "metrics.json", "model", "model/w"]
)
def test_link_in_run_folder_does_not_expose_other_files(served, tmp_path: Path, linked: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("SECRET")
    run = RunDir(served.root / "alpha")
    if linked == "folder":
        run.path.rename(outside / "alpha")
        run.path.symlink_to(outside / "alpha")
    else:
        target = run.path / linked
        if target.is_dir():
            target.rename(outside / "was")
        target.unlink(missing_ok=True)
        target.symlink_to(outside if linked == "model" else outside / "file")
    for path in ("/runs/alpha", "/runs/alpha/report", "/runs/alpha/events", "/compare?run=alpha&run=beta"):
        status, _, body = served.ask("GET", path)
        assert status == 404, (path, linked)
        assert b"SECRET" not in body
    assert "SECRET" not in str([asdict(row) for row in RunIndex(served.root).rows()])


def test_hostile_folder_name_has_safe_url_and_page(served) -> None:
    name = "<img src=x onerror=alert(1)>"
    make_folder(served.root / name, make_run([0.5], [0.5], steps_per_epoch=5), rows=12, hostile=True)
    found = [key for key in RunIndex(served.root).find_all() if key.startswith("run-")]
    assert len(found) == 1
    status, _, body = served.ask("GET", f"/runs/{found[0]}")
    assert status == 200
    assert b"<img" not in body
