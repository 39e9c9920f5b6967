"""The API on a real Unix socket, asked by real programs."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpsagent.cli import client
from mpsagent.linux import listen
from mpsagent.snapshot.condition import Condition
from tests.api.stand_in import START, Served

ROOT = Path(__file__).resolve().parents[2]


with_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def get(served: Served, target: str) -> tuple[int, Any]:
    status, raw = client.request(str(served.path), target)
    return status, json.loads(raw)


def order(served: Served, name: str, **body: Any) -> tuple[int, Any]:
    """As it goes over the agent's own socket."""
    try:
        return 200, client.order(str(served.path), name, body, 60)[0]
    except client.RequestRefused as refused:
        return refused.status, refused.error


def examples() -> list[str]:
    """The calls of curl in docs/api.md."""
    page = Path(__file__).resolve().parents[2] / "docs" / "api.md"
    return re.findall(r"^    (curl .*/run/mpsagent/mpsagent\.sock .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)


@with_curl
def test_each_example_with_curl_works(served: Served, tmp_path: Path) -> None:
    """What the documentation promises to people without our client; each call has an example."""
    socket, seen = str(served.path), set()
    for example in examples():
        done = subprocess.run(
            ["sh", "-c", example.replace("/run/mpsagent/mpsagent.sock", f"{socket} --fail-with-body --max-time 2")],
            capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == (28 if "follow=1" in example else 0), (example, done.stdout, done.stderr)
        assert "follow=1" in example or done.stdout, example
        path = example.split("http://mpsagent")[-1].strip("'").partition("?")[0]
        seen.add((path, "get"))
    assert served.api is not None
    paths = get(served, "/openapi.json")[1]["paths"]
    assert seen == {(path, method) for path, operations in paths.items() for method in operations}


def test_status_has_everything_on_one_page(served: Served) -> None:
    """The fields that scripts and the CLI build on."""
    status, body = get(served, "/v1/status")
    assert status == 200
    assert body["health"] == {"ok": True, "problems": []}
    assert (body["holder"]["pid"], body["holder"]["user"], body["clients"]) == (500, "alice", 1)
    assert [(w["uid"], w["clients"], w["seconds"]) for w in body["waiting"]] == [
        (20002, [600, 602], 30.0),
        (20003, [601], 20.0),
    ]
    assert (body["turn"]["user"], body["turn"]["processes"], body["turn"]["ends_in"]) == ("alice", 1, 1830.0)
    assert {(w["reason"], w["why"]) for w in body["waiting"]} == {("turn", "it is the turn of alice")}
    assert body["limits"] == {"verified": [500], "drifted": [], "unconfirmed": [], "fail_safe": []}
    assert (body["gate"]["connected"], body["not_guaranteed"]) == (True, [])
    assert body["pipe_directory"] == "/tmp/nvidia-mps"


def test_each_list_has_its_own_address(served: Served) -> None:
    """Servers, clients (waiting ones too), queue, policy."""
    assert [s["pid"] for s in get(served, "/v1/servers")[1]["servers"]] == [500]
    clients = get(served, "/v1/clients")[1]["clients"]
    assert [(c["pid"], c["state"]) for c in clients] == [
        (501, "running"),
        (600, "waiting"),
        (601, "waiting"),
        (602, "waiting"),
    ]
    assert [w["position"] for w in get(served, "/v1/queue")[1]["queue"]] == [1, 2]
    assert get(served, "/v1/policy")[1]["digest"] == served.backend.state.policy.digest
    assert get(served, "/v1/policy/explain?user=alice")[1]["active_threads"]["value"] == 20.0


def test_health_is_503_when_something_needs_a_person(served: Served) -> None:
    """For load balancers and scripts that read only the status."""
    assert get(served, "/healthz") == (200, {"ok": True, "drains": [], "problems": []})
    served.backend.conditions = (Condition("the control daemon is silent", START, "look at it"),)
    assert get(served, "/healthz") == (
        503,
        {"ok": False, "drains": [], "problems": ["the control daemon is silent; look at it"]},
    )


@pytest.mark.parametrize(
    ("target", "status", "word"),
    [
        ("/v1/nothing", 404, "openapi"),
        ("/v1/policy/explain", 400, "user"),
        ("/v1/policy/explain?user=not-there", 404, "there is no user"),
        ("/v1/policy/explain?user=a&color=red", 400, "color"),
        ("/v1/events?cursor=x", 400, "cursor"),
        ("/v1/events?cursor=-1", 400, "cursor"),
        ("/v1/events?limit=0", 400, "limit"),
        ("/v1/events?limit=99999", 400, "limit"),
        ("/v1/events?follow=maybe", 400, "follow"),
        ("/v1/events?cursor=9999", 410, "cursor"),
    ],
)
def test_errors_say_what_where_and_what_to_do(served: Served, target: str, status: int, word: str) -> None:
    """Each in the same JSON form with the right status."""
    got, answer = get(served, target)
    assert got == status, answer
    more = {"oldest"} if status == 410 else set()
    assert (set(answer), answer["status"]) == ({"type", "title", "status", "detail", "where", "hint", *more}, status)
    assert word in json.dumps(answer)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_over_http_nothing_can_be_ordered(served: Served, method: str) -> None:
    """And who tries, as with the first edition, is told where orders go."""
    for path in ("/v1/status", "/v1/leases"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            sock.connect(str(served.path))
            sock.sendall(f"{method} {path} HTTP/1.0\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            with sock.makefile("rb") as answer:
                said = answer.read()
        assert said.startswith((b"HTTP/1.1 405 ", b"HTTP/1.0 405 "))
        assert "mpsagent-cli" in json.loads(said.partition(b"\r\n\r\n")[2])["hint"]
    assert served.backend.asked == []


@pytest.mark.parametrize(
    ("name", "body", "status", "word"),
    [
        ("nothing", {}, 400, "terminate"),
        ("terminate", {}, 400, "process id"),
        ("terminate", {"pid": "abc"}, 400, "pid"),
        ("terminate", {"pid": 99999999999}, 400, "process id"),
        ("terminate", {"pid": True}, 400, "pid"),
        ("terminate", {"pid": 777}, 404, "777"),
        ("terminate", {"pid": 501, "now": "yes"}, 400, "now"),
        ("terminate", {"pid": 501, "force": True}, 400, "force"),
        ("drain", {"timeout": "soon"}, 400, "timeout"),
        ("drain", {"timeout": True}, 400, "timeout"),
        ("drain", {"timeout": -1}, 400, "timeout"),
        ("drain", {"timeout": 1e300}, 400, "timeout"),
        ("resume", {"x": 1}, 400, "x"),
    ],
)
def test_a_wrong_order_is_told_what_is_wrong(served: Served, name: str, body: Any, status: int, word: str) -> None:
    """In the same form, and nothing was carried out."""
    got, answer = order(served, name, **body)
    assert (got, answer["status"]) == (status, status), answer
    assert word in json.dumps(answer)
    assert served.backend.asked == []


def test_a_message_that_is_no_order(served: Served) -> None:
    """Garbage, a number, deep nesting, too much, nothing: an answer, never a fault of ours."""
    path = str(listen.orders_path(served.path))
    for raw in (b"{", b"7", b"[" * 16000, b"\xff", b"{" * 100_000, b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(60)
            sock.connect(path)
            if raw:
                sock.send(raw)
            sock.shutdown(socket.SHUT_WR)
            assert json.loads(sock.recv(1 << 20))["status"] in (400, 413), raw[:10]
    assert served.failures == []


def test_a_fault_of_ours_is_a_500_and_told(served: Served) -> None:
    """The person who asks gets an answer, the journal the exception."""
    status, body = get(served, "/v1/policy/explain?user=broken")
    assert (status, "RuntimeError" in body["detail"]) == (500, True)
    assert [str(one) for one in served.failures] == ["a bug"]


def test_acting_reaches_the_backend_with_who_asked(served: Served) -> None:
    """Each action once, with its arguments and the uid of the asker."""
    assert order(served, "terminate", pid=501, now=True)[0] == 200
    assert order(served, "terminate", pid=501, dry_run=True)[0] == 200
    assert order(served, "drain", timeout="10m")[0] == 200
    assert order(served, "drain")[0] == 200
    assert order(served, "resume")[0] == 200
    assert order(served, "restart-mps")[0] == 200
    assert order(served, "restart-mps", timeout="10m")[0] == 200
    assert order(served, "reload")[1] == {"ok": False, "errors": ["policy.toml:1: no"]}
    me = os.getuid()
    assert served.backend.asked == [
        ("terminate", 501, True, False, me),
        ("terminate", 501, False, True, me),
        ("drain", 600.0, me),
        ("drain", None, me),
        ("resume", me),
        ("restart", None, me),
        ("restart", 600.0, me),
        ("reload", me),
    ]


def test_metrics_are_prometheus_text(served: Served) -> None:
    """Each family has its type, each sample a number; labels from users cannot break a line."""
    status, raw = client.request(str(served.path), "/metrics")
    assert status == 200
    samples = {}
    for line in raw.decode().splitlines():
        if not line.startswith("# "):
            name, value = line.rsplit(" ", 1)
            samples[name] = float(value)
    assert samples["mpsagent_healthy"] == 1
    assert samples['mpsagent_user_waiting_seconds{mps_instance="default",reason="turn",user="20002"}'] == 30
    assert samples['mpsagent_servers{mps_instance="default",status="ACTIVE",user="20001"}'] == 1
    assert samples["mpsagent_api_connections"] == 1
    types = [line.split()[2] for line in raw.decode().splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert {re.sub(r"_(bucket|sum|count)$", "", name.split("{")[0]) for name in samples} <= set(types)


def test_openapi_lists_every_route_and_is_up_to_date(served: Served) -> None:
    """The document in the package is the one that the shapes give, and it has all that the router has."""
    status, body = get(served, "/openapi.json")
    assert status == 200
    document = runpy.run_path(str(ROOT / "packaging" / "write_openapi.py"))["document"]
    assert body == json.loads(json.dumps(document())), "run `make openapi`"
    assert served.api is not None
    routes = {
        (route.resource.canonical, route.method.lower())
        for route in served.api._runner.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert routes == {(path, method) for path, operations in body["paths"].items() for method in operations}


def test_openapi_is_valid(served: Served) -> None:
    """By the specification's own schema and rules: generators and viewers refuse what is not."""
    from openapi_spec_validator import OpenAPIV31SpecValidator

    document = get(served, "/openapi.json")[1]
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []
    document["paths"]["/v1/status"]["get"]["responses"] = {"200": {}}
    assert list(OpenAPIV31SpecValidator(document).iter_errors()), "it sees what is wrong"


def test_answers_have_the_shape_that_openapi_promises(served: Served) -> None:
    """A view that forgets a key, or invents one, is found here."""
    from pydantic import TypeAdapter

    from mpsagent.api import shapes

    served.backend.happen("test")
    for path, shape in (
        ("status", shapes.StatusShape),
        ("servers", shapes.ServersShape),
        ("clients", shapes.ClientsShape),
        ("queue", shapes.QueueShape),
        ("events", shapes.EventsShape),
    ):
        body = get(served, f"/v1/{path}")[1]
        assert TypeAdapter(shape).validate_python(body, strict=False) == body
