"""`mpsagent-cli metrics`: for Prometheus, as text, as a file for node_exporter, or over TCP.

Over TCP a process without rights asks the agent's socket, so that no network ever reaches the agent itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpsagent.cli import ask, client, options
from mpsagent.system import whole_file

if TYPE_CHECKING:
    from http.server import HTTPServer

AWAY = b"# HELP mpsagent_up 0 while mpsagent does not answer.\n# TYPE mpsagent_up gauge\nmpsagent_up "
LOOPBACK = "127.0.0.1"
PATIENCE = 5.0
"""Seconds for a peer's request, and for the agent's answer."""


@click.command()
@click.option("--textfile", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write FILE (NAME.prom) for node_exporter's textfile collector, whole or not at all.")  # fmt: skip
@click.option("--listen", metavar="[HOST:]PORT", help="Serve /metrics there until stopped; without HOST on loopback.")
@options.json
@click.pass_obj
def metrics(path: str, textfile: Path | None, listen: str | None, as_json: bool) -> None:
    """The metrics, as text for Prometheus.

    Exit status: 3 when mpsagent does not answer; the file then says mpsagent_up 0.
    """
    if (listen is not None) + (textfile is not None) + as_json > 1:
        raise click.UsageError("give --textfile, --listen or --json")
    if listen is not None:
        _serve(path, listen)
        return
    try:
        text = scraped(path)
    except (client.Unreachable, OSError) as gone:
        if textfile is not None:
            _write(textfile, AWAY + b"0\n")
        ask.unreachable(gone if isinstance(gone, client.Unreachable) else client.Unreachable(str(gone)))
        return
    if as_json:
        click.echo(as_families(text.decode()))
    elif textfile is None:
        click.echo(text.decode(), nl=False)
    else:
        _write(textfile, text)


def scraped(path: str) -> bytes:
    """The agent's metrics, and that it is up. Raises Unreachable, or OSError where it gives none."""
    status, text = client.request(path, "/metrics", timeout=PATIENCE)
    if status != 200:
        raise OSError(0, f"mpsagent gives no metrics: status {status}")
    return text + AWAY + b"1\n"


def as_families(text: str) -> str:
    """As JSON: each metric with its samples."""
    import json

    from prometheus_client.parser import text_string_to_metric_families

    families = [
        {"name": one.name, "type": one.type, "help": one.documentation,
         "samples": [{"name": sample.name, "labels": sample.labels, "value": sample.value} for sample in one.samples]}
        for one in text_string_to_metric_families(text)
    ]  # fmt: skip
    return json.dumps({"metrics": families})


def _write(file: Path, text: bytes) -> None:
    """node_exporter reads at any moment, and as another user."""
    try:
        whole_file.write(file, text, 0o644)
    except OSError as error:
        click.echo(f"mpsagent-cli: {file}: {error.strerror}", err=True)
        sys.exit(ask.USAGE)


def _serve(path: str, listen: str) -> None:
    host, _, port = listen.rpartition(":")
    if not (port.isdecimal() and int(port) < 65536):
        raise click.BadParameter(f"{listen!r}: write a port, or HOST:PORT", param_hint="--listen")
    try:
        server = bind(path, host.strip("[]") or LOOPBACK, int(port))
    except OSError as error:
        click.echo(f"mpsagent-cli: {listen}: {error.strerror or error}", err=True)
        sys.exit(ask.USAGE)
    click.echo(f"metrics at http://{server.server_name}:{server.server_port}/metrics", err=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(ask.FINE)


def bind(path: str, host: str, port: int) -> HTTPServer:
    """One peer at a time, each with a deadline: a scrape is quick, and a slow one is cut off."""
    import socket
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from socketserver import TCPServer

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE

        def do_GET(self) -> None:
            code, body = 200, b""
            if self.path.partition("?")[0] != "/metrics":
                code, body = 404, b"only /metrics is here\n"
            else:
                try:
                    body = scraped(path)
                except (client.Unreachable, OSError) as error:
                    code, body = 503, (str(error) + "\n").encode()
            self.send_response_only(code)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """A peer must not be able to fill the journal."""

    class Server(HTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            """Without asking the name service who we are."""
            TCPServer.server_bind(self)
            name = str(self.server_address[0])
            self.server_name, self.server_port = f"[{name}]" if ":" in name else name, int(self.server_address[1])

        def handle_error(self, *peer: object) -> None:
            """A peer that hangs up is no news."""

    return Server((host, port), Handler)
