"""Metrics: counted once, named by Prometheus's rules, scraped by a real one that answers every query that we ship."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from mpsagent.api import metrics as module
from mpsagent.api.metrics import MOST_USED, Metrics
from mpsagent.cli.metrics import PEERS
from mpsagent.cli.verbs import cli
from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.inputs import Peer
from mpsagent.core.model import Client, Use
from mpsagent.mps.limits import Limits
from mpsagent.policy.keys import KEYS
from tests.api.prometheus import program
from tests.api.stand_in import Served, StandIn, serve
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "packaging" / "prometheus" / "mpsagent-alerts.yml"
BOARD = ROOT / "packaging" / "prometheus" / "mpsagent-dashboard.json"
NO_LIMITS = Limits(100.0, {})


def scrape(metrics: Metrics, **status: Any) -> dict[str, float]:
    if "clients_by_uid" in status:
        metrics.work("default", map(int, status["clients_by_uid"]))
    page = StandIn().status()
    page["instances"][0] |= status
    text = metrics.text({**page, **status}, 0, 0, 0).decode()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def record(one: tr.Transition | act.Action) -> dict[str, Any]:
    """As the agent writes it down."""
    if isinstance(one, act.Action):
        kind = one.kind if isinstance(one, act.Report) else "action"
        return {**act.action_fields(one), "kind": kind, "action": type(one).__name__}
    return {"kind": one.kind, **tr.transition_fields(one)}


def a_day(metrics: Metrics, instance: str = "default") -> None:
    """One of everything."""
    for one in (
        tr.GateConnected(0.0, 1), tr.ControlStarted(0.0, 2), tr.ServerReady(0.0, 3, 1000),
        tr.TurnBegan(1.0, 1000, None), tr.ClientConnected(1.0, 10, 1000, 2.5, NO_LIMITS, False, 0.004),
        tr.ClientRefused(2.0, 11, 1001, "denied"), tr.ClientLeft(2.0, 12, 1001, 3.0), tr.FaultBegan(2.5, 3, 1000),
        act.TerminateClient(reason="", rule="turn.time_limit", uid=1000, pid=10, start=1, server=3, deadline=1.0),
        act.SignalClient(reason="", rule="turn.time_limit", uid=1000, pid=10, start=1, signal=15),
        tr.ClientEnded(3.0, 10, 1000, 3, "ended", 2.0, 2.5), tr.TurnEnded(3.0, 1000, 2.0, True),
        tr.ClientUsed(3.0, 10, 1000, 2.0, 1.0, 300.0, False, True),
        tr.TurnBegan(3.1, 1001, 0.1), tr.GateConnected(4.0, 9),
        act.Report(reason="", rule="built-in", kind="limits.mismatch"),
        tr.HandoverFailed(5.0, 10, 1000, "limits", "", False), tr.ServerStartFailed(6.0, 7, "no GPU", 1),
    ):  # fmt: skip
        metrics.hear(instance, record(one))


def test_a_warning_and_an_end_that_failed_are_no_forced_ends() -> None:
    metrics = Metrics()
    asked = act.TerminateClient(reason="", rule="order", uid=1000, pid=11, start=1, server=3, deadline=1.0)
    for one in (
        *(tr.ClientConnected(1.0, pid, 1000, 0.0, NO_LIMITS, False) for pid in (10, 11)),
        act.WarnClient(reason="", rule="turn.warning_signal", uid=1000, pid=10, start=1, signal=10), asked,
    ):  # fmt: skip
        metrics.hear("default", record(one))
    metrics.hear("default", {**record(asked), "kind": "action.failed"})
    for pid in (10, 11):
        metrics.hear("default", record(tr.ClientEnded(9.0, pid, 1000, 3, "ok", 8.0, 0.0)))
    assert not [name for name in scrape(metrics) if name.startswith("mpsagent_forced_ends_total")]


def test_an_end_by_a_signal_counts_although_the_answer_of_mps_comes_too_late() -> None:
    metrics = Metrics()
    how = {"reason": "", "rule": "order", "uid": 1000, "pid": 11, "start": 1}
    asked = act.TerminateClient(**how, server=3, deadline=1.0)
    metrics.hear("default", record(tr.ClientConnected(1.0, 11, 1000, 0.0, NO_LIMITS, False)))
    for one in (asked, act.SignalClient(**how, signal=15)):
        metrics.hear("default", record(one))
    metrics.hear("default", {**record(asked), "kind": "action.failed"})
    metrics.hear("default", record(tr.ClientEnded(9.0, 11, 1000, 3, "ended", 8.0, 0.0)))
    assert scrape(metrics)['mpsagent_forced_ends_total{mps_instance="default",rule="order"}'] == 1


def test_what_happens_is_counted_once() -> None:
    """A client that is asked and then signalled is ended once, by its rule."""
    metrics = Metrics()
    a_day(metrics)
    found = scrape(metrics)
    of = '{mps_instance="default"}'
    for name in (
        "faults", "refusals", "clients_left", "handover_failures", "control_starts", "server_starts", "user_changes",
        "server_start_failures", "limit_mismatches",
    ):  # fmt: skip
        assert found[f"mpsagent_{name}_total{of}"] == 1, name
    assert found[f"mpsagent_turns_total{of}"] == 2
    assert found['mpsagent_forced_ends_total{mps_instance="default",rule="turn.time_limit"}'] == 1
    assert found['mpsagent_client_ends_total{mps_instance="default",outcome="ended"}'] == 1
    assert found["mpsagent_gate_restarts_total"] == 1
    assert found[f"mpsagent_wait_seconds_sum{of}"] == 2.5
    assert found['mpsagent_handover_seconds_bucket{le="0.005",mps_instance="default"}'] == 1
    assert found['mpsagent_handover_seconds_bucket{le="0.0025",mps_instance="default"}'] == 0
    assert found[f"mpsagent_user_change_gap_seconds_sum{of}"] == 0.1
    assert not [name for name in found if "_created" in name]


def test_the_time_of_a_user_grows_while_a_client_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that was there before the agent, and only while it is there."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    metrics, series = Metrics({1: "alice"}.get), 'mpsagent_gpu_seconds_total{mps_instance="default",user="alice"}'
    assert scrape(metrics, clients_by_uid={"1": 2})[series] == 0
    now[0] = 110.0
    assert scrape(metrics, clients_by_uid={"1": 1})[series] == 10
    now[0] = 115.0
    metrics.work("default", [])
    now[0] = 200.0
    assert scrape(metrics, clients_by_uid={})[series] == 15


def a_client(uid: int, job: str | None = None, **use: Any) -> Client:
    return Client(Peer(uid, uid, 0, 1), 0.0, job=job, use=Use(**use))


def test_what_users_and_their_jobs_use() -> None:
    """Of who is at work what NVML said last; energy on record and not yet, and it never falls."""
    metrics = Metrics({1: "alice", 2: "bob"}.get)
    pod = "pod:lab/train-0:" + "0123456789abcdef" * 2
    metrics.use("default", [
        a_client(1, utilization=0.25, energy=100.0), a_client(1, utilization=0.75, energy=50.0),
        a_client(1, "slurm-7"), a_client(2, pod, utilization=0.5, energy=5.0),
    ])  # fmt: skip
    of = 'mps_instance="default",namespace="{}",pod="{}",user="{}"'
    alice = f'{{job="",{of.format("", "", "alice")}}}'
    bobs = f'{{job="",{of.format("lab", "train-0", "bob")}}}'
    found = scrape(metrics)
    ratios = {name: value for name, value in found.items() if name.startswith("mpsagent_utilization_ratio")}
    assert ratios == {f"mpsagent_utilization_ratio{alice}": 0.75, f"mpsagent_utilization_ratio{bobs}": 0.5}
    assert found[f"mpsagent_energy_joules_total{alice}"] == 150.0
    metrics.use("default", [])  # they have gone, and what they used is not on record yet
    assert scrape(metrics)[f"mpsagent_energy_joules_total{alice}"] == 150.0
    metrics.hear("default", record(tr.ClientUsed(1.0, 1, 1, 9.0, 3.0, 160.0, False, True)))
    metrics.hear("default", record(tr.ClientUsed(1.0, 3, 1, 9.0, 3.0, 7.0, False, True, "slurm-7")))
    found = scrape(metrics)
    assert found[f"mpsagent_energy_joules_total{alice}"] == 160.0
    assert found[f'mpsagent_energy_joules_total{{job="slurm-7",{of.format("", "", "alice")}}}'] == 7.0
    assert not [name for name in found if name.startswith("mpsagent_utilization_ratio")]


def test_jobs_of_a_year_make_no_thousands_of_series() -> None:
    """Those that were at work last keep theirs; beyond the bound they are together."""
    metrics = Metrics()
    for number in range(2000):
        metrics.hear("default", record(tr.ClientUsed(1.0, 1, 1, 9.0, 3.0, 1.0, False, True, f"job-{number}")))
    metrics.use("default", [a_client(1, f"live-{number}", utilization=0.5, energy=1.0) for number in range(600)])
    found = scrape(metrics)
    energy = [name for name in found if name.startswith("mpsagent_energy_joules")]
    assert len(energy) <= MOST_USED + 1
    assert [name for name in energy if 'user="other"' in name]
    assert not [name for name in energy if "job-" in name]
    assert len([name for name in found if name.startswith("mpsagent_utilization_ratio")]) == MOST_USED


def test_thousands_of_uids_make_no_thousands_of_series() -> None:
    """Who comes with subordinate ids must not fill the memory of agent and Prometheus."""
    metrics = Metrics()
    found = scrape(metrics, clients_by_uid={str(uid): 1 for uid in range(3000)})
    clients = {name: value for name, value in found.items() if name.startswith("mpsagent_clients{")}
    assert len(clients) == module.MOST_USERS + 1
    assert sum(clients.values()) == 3000
    assert clients['mpsagent_clients{mps_instance="default",user="other"}'] == 3000 - module.MOST_USERS


def test_a_name_cannot_break_a_line() -> None:
    """Names come from a name service."""
    found = scrape(Metrics(lambda uid: 'a"\n{}\\b'), clients_by_uid={"1": 1})
    assert found['mpsagent_clients{mps_instance="default",user="a\\"\\n{}\\\\b"}'] == 1


def test_promtool_finds_nothing_to_complain_about() -> None:
    """Names, units and types by Prometheus's rules; the alert rules are rules."""
    metrics = Metrics()
    a_day(metrics)
    text = metrics.text(StandIn().status(), 0, 0, 0)
    promtool = program("promtool")
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
    bad = text.replace(b"mpsagent_faults_total", b"mpsagent_faults")
    assert subprocess.run([promtool, "check", "metrics"], input=bad, capture_output=True, check=False).returncode
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_when_it_should_and_at_no_other_time(tmp_path: Path) -> None:
    """Played by promtool over hours of made-up series; and it sees a rule that no longer does what it is for."""
    plays = Path(__file__).with_name("alerts.yml")
    assert set(re.findall(r"alert: (\w+)", RULES.read_text())) <= set(re.findall(r"Mpsagent\w+", plays.read_text()))
    (tmp_path / "plays.yml").write_text(plays.read_text().replace("../../packaging/prometheus/", ""))
    rules = tmp_path / RULES.name
    words = [program("promtool"), "test", "rules", str(tmp_path / "plays.yml")]
    rules.write_text(RULES.read_text())
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rules.write_text(RULES.read_text().replace("for: 2m", "for: 5s"))
    assert subprocess.run(words, capture_output=True, check=False).returncode == 1


def test_as_json_each_metric_has_its_samples() -> None:
    """For programs that do not read Prometheus's text."""
    with serve() as served:
        done = CliRunner().invoke(cli, ["--socket", str(served.path), "metrics", "--json"])
    found = {one["name"]: one for one in json.loads(done.stdout)["metrics"]}
    assert found["mpsagent_waiting_users"]["type"] == "gauge"
    assert found["mpsagent_waiting_users"]["samples"] == [
        {"name": "mpsagent_waiting_users", "labels": {"mps_instance": "default"}, "value": 2.0}
    ]
    assert found["mpsagent_up"]["samples"][0]["value"] == 1
    assert CliRunner().invoke(cli, ["metrics", "--json", "--listen", "0"]).exit_code == 2


def test_the_page_names_every_metric_and_no_other() -> None:
    """Whoever writes a query reads docs/api.md."""
    metrics = Metrics()
    a_day(metrics)
    text = metrics.text(StandIn().status(), 0, 0, 0).decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    part = (ROOT / "docs" / "api.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(mpsagent_[a-z_]+)", part)) - {"mpsagent_process_", "mpsagent_up"}
    shown = {one for one in kinds if not one.startswith("mpsagent_process_")}
    assert named - {"mpsagent_process_start_time_seconds"} == shown


@contextmanager
def exporter(served: Served) -> Iterator[str]:
    """`mpsagent-cli metrics --listen 0`; its address."""
    words = [sys.executable, "-m", "mpsagent.cli.main", "--socket", str(served.path), "metrics", "--listen", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = re.fullmatch(r"metrics at http://(127\.0\.0\.1:\d+)/metrics\n", process.stderr.readline())
        assert said
        yield said[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_over_tcp_there_are_metrics_and_nothing_else() -> None:
    """On loopback unless told; an agent that is away is a scrape that failed."""
    with serve() as served, exporter(served) as address:
        status, text = fetch(f"http://{address}/metrics")
        assert (status, text.endswith("mpsagent_up 1\n")) == (200, True)
        assert fetch(f"http://{address}/v1/status")[0] == 404
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            assert "Server" not in answer.headers
        assert served.api is not None
        served.path.unlink()
        assert fetch(f"http://{address}/metrics")[0] == 503


def test_whoever_says_nothing_there_keeps_no_prometheus_out() -> None:
    """One at a time was served: seven silent connections, or one with a byte now and then, were enough."""
    with serve() as served, exporter(served) as address, ExitStack() as silent:
        host, _, port = address.partition(":")
        for number in range(PEERS + 1):
            peer = silent.enter_context(socket.create_connection((host, int(port)), 60))
            peer.send(b"GET /metrics HTTP/1.1\r\nX: "[: number % 24])
        assert fetch(f"http://{address}/metrics")[0] == 200
        first = silent.enter_context(socket.create_connection((host, int(port)), 60))
        with suppress(OSError):
            while not select.select([first], [], [], 0.2)[0]:
                first.send(b"x")  # a byte now and then does not move its deadline
            assert first.recv(1) == b""


def test_a_textfile_is_whole_readable_and_says_when_the_agent_is_away(tmp_path: Path) -> None:
    """node_exporter reads it at any moment, as a user of its own."""
    file = tmp_path / "mpsagent.prom"

    def write(path: Path) -> int:
        return CliRunner().invoke(cli, ["--socket", str(path), "metrics", "--textfile", str(file)]).exit_code

    with serve() as served:
        assert write(served.path) == 0
        assert "\nmpsagent_up 1\n" in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        done = CliRunner().invoke(cli, ["--socket", str(served.path), "metrics"])
        assert "mpsagent_build_info{" in done.output
    assert write(tmp_path / "gone.sock") == 3
    assert file.read_text().splitlines()[-1] == "mpsagent_up 0"
    assert os.listdir(tmp_path) == [file.name]
    assert CliRunner().invoke(cli, ["metrics", "--listen", "x:y"]).exit_code == 2


def test_a_textfile_that_cannot_be_written_is_an_error_and_no_output(tmp_path: Path) -> None:
    words = ["--socket", str(tmp_path / "none"), "metrics", "--textfile", str(tmp_path / "none" / "x.prom")]
    done = CliRunner().invoke(cli, words)
    assert (done.exit_code, done.stdout, "No such file" in done.stderr) == (2, "", True)


def test_a_real_node_exporter_takes_the_textfile(tmp_path: Path) -> None:
    """It drops a whole file for one line that it does not like, or for a metric that it has itself."""
    exporter = program("prometheus-node-exporter")
    (tmp_path / "d").mkdir()
    with serve() as served:
        assert served.api is not None
        a_day(served.api.metered)
        words = ["--socket", str(served.path), "metrics", "--textfile", str(tmp_path / "d" / "mpsagent.prom")]
        assert CliRunner().invoke(cli, words).exit_code == 0
    port = free_port()
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [exporter, f"--web.listen-address=127.0.0.1:{port}", f"--collector.textfile.directory={tmp_path}/d"],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            text = ""

            def answers() -> bool:
                nonlocal text
                try:
                    text = fetch(f"http://127.0.0.1:{port}/metrics")[1]
                except (urllib.error.URLError, ConnectionError):
                    return False
                return "node_textfile_scrape_error" in text

            until(answers, 60)
        finally:
            process.kill()
            process.wait()
    assert "\nnode_textfile_scrape_error 0\n" in text, (tmp_path / "log").read_text()
    assert "\nmpsagent_up 1\n" in text
    assert '\nmpsagent_faults_total{mps_instance="default"} 1\n' in text


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Real:
    """A Prometheus that scrapes an exporter every second."""

    def __init__(self, where: Path, target: str) -> None:
        self.port = free_port()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "mpsagent", "static_configs": [{"targets": [target]}]}],
        }  # fmt: skip
        (where / "prometheus.yml").write_text(json.dumps(config))  # YAML is a superset
        self.log = open(where / "log", "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [program("prometheus"), f"--config.file={where}/prometheus.yml", f"--storage.tsdb.path={where}/data",
             f"--web.listen-address=127.0.0.1:{self.port}"],
            stdout=self.log, stderr=self.log,
        )  # fmt: skip

    def get(self, path: str, **query: str) -> Any:
        try:
            status, text = fetch(f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}")
        except (urllib.error.URLError, ConnectionError):
            return None
        found = json.loads(text) if text.startswith("{") else {"status": text}
        assert status != 400, (query, found)
        return found["data"] if found["status"] == "success" else None

    def ask(self, query: str) -> list[Any]:
        return (self.get("query", query=query) or {"result": []})["result"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def test_a_real_prometheus_answers_every_query_of_the_dashboard_and_the_alerts(tmp_path: Path) -> None:
    """Scraped over TCP; a query whose series is not there, or is called otherwise, has no answer."""
    board = json.loads(BOARD.read_text())
    targets = [(one["expr"], panel["title"]) for panel in board["panels"] for one in panel["targets"]]
    assert len(targets) > 15
    for needed in ("uid", "title", "schemaVersion", "panels", "templating", "time"):
        assert needed in board
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    backend = StandIn()
    backend.memory = {501: 1 << 30}
    program("prometheus")
    with serve(backend) as served, exporter(served) as address:
        assert served.api is not None
        real = Real(tmp_path, address)
        try:
            metered = served.api.metered
            a_day(metered)
            until(lambda: bool(real.ask("up == 1")), 60)
            for _ in range(3):
                a_day(metered)
                metered.work("default", [20001])
                metered.use("default", [a_client(20001, utilization=0.5, energy=1.0)])
                time.sleep(1.1)  # a rate is made of two scrapes
            for expr, title in targets:
                query = expr.replace("$node", ".*").replace("$__rate_interval", "1m")
                until(_answers(real, query), 20)
                assert real.ask(query), title
            assert float(real.ask("increase(mpsagent_faults_total[1m])")[0]["value"][1]) > 0
            until(lambda: bool((real.get("rules") or {"groups": []})["groups"]), 20)
            rules = real.get("rules")["groups"][0]["rules"]
            until(lambda: all(one["health"] == "ok" for one in real.get("rules")["groups"][0]["rules"]), 20)
            assert len(rules) >= 10
            assert real.ask('ALERTS{alertname="MpsagentDown"}') == []
            known = set(re.findall(r"mpsagent_\w+", RULES.read_text())) - {"mpsagent_up"}
            names = set(real.get("label/__name__/values"))
            assert known <= names, known - names
            served.path.unlink()
            until(lambda: bool(real.ask('ALERTS{alertname="MpsagentDown"}')), 60)
        finally:
            real.close()


def _answers(real: Real, query: str) -> Callable[[], bool]:
    return lambda: bool(real.ask(query))


def test_each_alert_names_a_runbook_that_is_there_and_the_critical_one_says_what_it_says() -> None:
    """The alert for the gate said that programs may run outside MPS. The runbook says that they wait."""
    found = {one["alert"]: one["annotations"] for one in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]}
    for alert, told in found.items():
        page, _, anchor = told["runbook_url"].partition("#")
        text = (ROOT / page.removeprefix("file:///usr/share/doc/mpsagent/")).read_text()
        heads = [head.lower().replace(",", "").replace(" ", "-") for head in re.findall(r"(?m)^#+ (.*)$", text)]
        assert anchor in heads, alert
    assert found["MpsagentGateDown"]["description"].startswith("New programs wait")


def test_each_alert_names_commands_and_keys_that_exist() -> None:
    """What an administrator is told to type at night has to work."""
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    texts = [text for one in rules for text in one["annotations"].values()]
    pattern = re.compile(r"mpsagent-cli ([a-z]+(?: [-a-z.0-9]+)*)")
    commands = [words.split() for text in texts for words in pattern.findall(text)]
    assert len(commands) >= 5
    for verb, *words in commands:
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None, verb
        options = {name for one in command.params for name in one.opts}
        assert {word for word in words if word.startswith("--")} <= options, (verb, words)
    named = {name for text in texts for name in re.findall(r"\b([a-z]+_[a-z_]+)\b", text)} - {"mps_instance"}
    assert named <= {key.name for key in KEYS}, named
    assert {one["labels"]["severity"] for one in rules} <= {"critical", "warning", "info"}
