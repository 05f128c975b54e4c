"""A live page of runs on this machine: curves while they train, and each run's page with its mined images.

The standard library's server is enough: it answers this machine alone, reads text files, and needs no network.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from psm.reporting.runs.summary import RunSummary, find_runs
from psm.reporting.runs.table import age
from psm.reporting.templates import template_environment, template_source
from psm.utils.errors import UserError
from psm.utils.run_folder import RunFolder

HOST = "127.0.0.1"
CURVES = {  # metric -> title
    "loss": "loss",
    "knn": "nearest neighbors, top-1 %",
    "linear": "linear probe, top-1 %",
    "validation": "accuracy on validation images, %",
    "effective_rank": "effective rank of the features",
    "mined_similarity": "similarity of mined positives",
    "images_per_second": "images a second",
}
POINTS = 500  # of a curve that are sent; longer ones are thinned out


def serve(folder: Path, port: int) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UserError: The folder holds no run, or the port is taken.
    """
    find_runs(folder)
    with make_server(folder, port) as server:
        print(f"runs of {folder}: http://{HOST}:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of the page that listens on this machine alone."""
    handler = type("RunsHandler", (_Handler,), {"folder": folder, "writing": threading.Lock()})
    try:
        server = ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise UserError(f"port={port} cannot be used ({error.strerror}): give another, or port=0 for any.") from None
    server.daemon_threads = True
    return server


def describe(run: RunSummary) -> dict[str, Any]:
    """A run as the page's script reads it."""
    config = run.config
    curves = {name: _curve(run.metrics, name) for name in CURVES}
    return {
        "name": run.name,
        "state": run.state,
        "age": age(run.changed),
        "method": run.method,
        "data": run.data,
        "encoder": (config.encoder if config else "") or "",
        "epoch": run.epoch,
        "epochs": config.epochs if config else 0,
        "problem": run.problem,
        "scores": dict(run.scores),
        "curves": {name: points for name, points in curves.items() if points},
    }


def _curve(metrics: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    points = [[line.get("epoch", 0), line[name]] for line in metrics if isinstance(line.get(name), (int, float))]
    every = -(-len(points) // POINTS)
    return points if every <= 1 else [*points[:-1:every], points[-1]]


class _Handler(BaseHTTPRequestHandler):
    folder: Path
    writing: threading.Lock  # pages are written one at a time

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").partition(":")[0]
        if host not in (HOST, "localhost"):  # a page of another site that names this server by its own address
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this page is for this machine alone")
            return
        try:
            self._answer(HTTPStatus.OK, *self._content(urlsplit(self.path)))
        except UserError as error:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", str(error))

    def _content(self, address: SplitResult) -> tuple[str, str]:
        """Type and text of what is at an address."""
        if address.path == "/":
            return "text/html", _page(self.folder)
        if address.path == "/runs.json":
            return "application/json", json.dumps([describe(run) for run in find_runs(self.folder)])
        if address.path == "/run":
            return "text/html", self._run_page(parse_qs(address.query).get("name", [""])[0])
        raise UserError("there is no such page.")

    def _run_page(self, name: str) -> str:
        """The run's page, made anew where a checkpoint was written since."""
        found = next((run for run in find_runs(self.folder) if run.name == name), None)
        if found is None:
            raise UserError(f"there is no run {name} in {self.folder}.")
        run = RunFolder(found.folder)
        with self.writing:
            if not run.page.exists() or _is_newer(run.checkpoint, run.page):
                from psm.reporting.run_page import write_page  # imports torch

                write_page(run.folder)
        return run.page.read_text(encoding="utf-8")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: a request every other second is no news."""


def _is_newer(path: Path, than: Path) -> bool:
    return path.exists() and path.stat().st_mtime > than.stat().st_mtime


def _page(folder: Path) -> str:
    environment = template_environment()
    look, script = (template_source(environment, name) for name in ("look.css", "runs.js"))
    page = environment.get_template("runs.html")
    return page.render(folder=folder.resolve(), curves=list(CURVES.items()), look=look, script=script)
