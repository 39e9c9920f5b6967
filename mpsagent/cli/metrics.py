"""`mpsagent-cli metrics`: for Prometheus, as text, as a file for node_exporter, or over TCP.

Over TCP a process without rights asks the agent's socket, so that no network ever reaches the agent itself.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from mpsagent.cli import ask, client, options
from mpsagent.linux import atomic_file

AWAY = b"# HELP mpsagent_up 0 while mpsagent does not answer.\n# TYPE mpsagent_up gauge\nmpsagent_up "
LOOPBACK = "127.0.0.1"
PATIENCE = 5.0
"""Seconds for the agent's answer, and for a peer's request with its answer."""
PEERS = 64


@click.command()
@click.option("--textfile", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write FILE (NAME.prom) for node_exporter's textfile collector, whole or not at all.")  # fmt: skip
@click.option(
    "--listen", metavar="[HOST:]PORT", help="Serve /metrics at this address until stopped; without HOST on loopback."
)
@options.json
@click.pass_obj
def metrics(path: str, textfile: Path | None, listen: str | None, as_json: bool) -> None:
    """Print metrics as text for Prometheus.

    Exit status: 3 if mpsagent does not answer. The file then contains mpsagent_up 0.
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
        atomic_file.write(file, text, 0o644)
    except OSError as error:
        click.echo(f"mpsagent-cli: {file}: {error.strerror}", err=True)
        sys.exit(ask.USAGE)


def _serve(path: str, listen: str) -> None:
    host, _, port = listen.rpartition(":")
    if not (port.isdecimal() and int(port) < 65536):
        raise click.BadParameter(f"{listen!r}: write a port, or HOST:PORT", param_hint="--listen")
    try:
        asyncio.run(_listen(path, host.strip("[]") or LOOPBACK, int(port)))
    except OSError as error:
        click.echo(f"mpsagent-cli: {listen}: {error.strerror or error}", err=True)
        sys.exit(ask.USAGE)
    except KeyboardInterrupt:
        sys.exit(ask.FINE)


async def _listen(path: str, host: str, port: int) -> None:
    """Each peer has a deadline; when all places are taken the oldest makes way. A scrape is quick."""
    peers = dict[asyncio.Task[None] | None, None]()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        if len(peers) >= PEERS and (oldest := next(iter(peers))) is not None:
            oldest.cancel()
        peers[me] = None
        try:
            async with asyncio.timeout(PATIENCE):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await asyncio.to_thread(_answer, path, head))
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # a peer that hangs up, or is slow, is no news: it must not be able to fill the journal
        finally:
            del peers[me]
            writer.transport.abort()

    server = await asyncio.start_server(peer, host, port)
    name, number = server.sockets[0].getsockname()[:2]
    click.echo(f"metrics at http://{f'[{name}]' if ':' in name else name}:{number}/metrics", err=True)
    await server.serve_forever()


def _answer(path: str, asked: bytes) -> bytes:
    words = asked.split(b"\r\n")[0].split()
    if len(words) != 3 or words[0] != b"GET" or words[1].partition(b"?")[0] != b"/metrics":
        status, body = "404 Not Found", b"only GET /metrics is here\n"
    else:
        try:
            status, body = "200 OK", scraped(path)
        except (client.Unreachable, OSError) as error:
            status, body = "503 Service Unavailable", f"{error}\n".encode()
    fields = (
        f"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {len(body)}\r\nConnection: close"
    )
    return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body
