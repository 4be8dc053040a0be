"""The first request after startup (benchmarks/gpu), on a fake server that takes its time for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.site import ROOT
from tests.distributions import install_distribution

SCRIPT = ROOT / "benchmarks" / "gpu" / "first_request.py"
SERVER = """
import http.server, json, os, sys, time

seen, connections = [], []


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def setup(self):
        super().setup()
        connections.append(self.client_address)

    def do_GET(self):
        # As the engine's /health does: a request of one token runs, and the next is not the first.
        seen.append([0])
        self.answer(200, b"")

    def do_POST(self):
        # On the connection that was opened before: what a client's first request costs itself is not the server's.
        if len(connections) > 1:
            return self.answer(400, b"a new connection")
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert len(body["input_ids"]) == 128 and body["input_ids"] not in seen
        time.sleep(abs(float(os.environ["FIRST_S"])) if not seen and os.environ["SGLANG_DSV4_GRAPHS"] == "1" else 0.03)
        seen.append(body["input_ids"])
        self.answer(503 if os.environ["FIRST_S"] == "-1" else 200, b"{}")


assert "--skip-server-warmup" not in sys.argv
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
print("The server is fired up and ready to roll!" if os.environ["FIRST_S"] != "0" else "no", flush=True)
server.serve_forever() if os.environ["FIRST_S"] != "0" else sys.exit(3)
"""


def run(tmp_path: Path, first_s: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "site" / "sglang").mkdir(parents=True)
    modules = {"sglang/launch_server": SERVER, "sglang/__init__": ""}
    site = install_distribution(tmp_path / "site", "sglang", {}, **modules)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "RESULTS": str(tmp_path / "results"),
        "MODELS": str(tmp_path),
        "FIRST_S": first_s,
    }
    return subprocess.run(
        [sys.executable, str(SCRIPT), "rank"],
        env=os.environ | environment,
        text=True,
        capture_output=True,
        timeout=120,
    )


@pytest.mark.parametrize(("first_s", "last"), [("0.03", "PASS"), ("0.3", "FAIL rank")])
def test_the_plugin_s_first_request_decides(tmp_path: Path, first_s: str, last: str) -> None:
    done = run(tmp_path, first_s)
    assert done.stdout.splitlines()[-1] == last, done.stderr
    assert done.returncode == (last != "PASS")
    rows = json.loads((tmp_path / "results" / "first-request.json").read_text())
    assert [(r["model"], r["variant"], len(r["ms"])) for r in rows] == [("rank", "plugin", 12), ("rank", "eager", 12)]
    assert rows[0]["first"] == rows[0]["ms"][0]


def test_an_answer_that_is_none_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "-1")
    assert done.returncode == 1
    assert "POST /generate: 503" in done.stderr


def test_a_server_that_does_not_come_up_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "0")
    assert done.returncode == 1
    assert "rank, plugin: no server" in done.stderr
