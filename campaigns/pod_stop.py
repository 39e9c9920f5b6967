#!/usr/bin/env python3
"""Pods that a real containerd, asked as by a kubelet (CRI), stops in the middle of a kernel, and their neighbours.

    pod_stop.py --out DIR       with the real MPS and GPU of this machine: root needed
    pod_stop.py --sim           with the simulator
    pod_stop.py --packages FILE containerd as containerd_packages.sh packs it (.gpu/containerd/containerd.tar.xz)

Each round has a pod and four neighbours on one server; then the pod is stopped. `runtime`: by mpsagent-runtime,
`preStop`: after the hook that docs/jobs.md names, `without`: by runc alone. In DIR: pod-stop.md. mpsagent and what it
needs must be importable, and grpcio and protobuf. Exit status: 0 all neighbours of runtime and preStop finished, 1 not,
2 it cannot begin.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import Broken, facts, parser, place
from mpsagent_kubernetes import protocol
from tests.conformance import rig as rigs
from tests.conformance.backends import REPOSITORY, other_users_python
from tests.scenes.stage import USERS, Stage, StageError

ROUNDS = {"without": 2, "runtime": 5, "preStop": 2}
NEIGHBOURS = 4
GRACE = 10
IMAGE = "example.invalid/pod:1"
HOST, CONTAINER = 2, 1
"""NamespaceMode of CRI: the network is the host's, the pids are the container's own."""
# The published fields of CRI v1 (k8s.io/cri-api) that are used here.
CRI = protocol.package("runtime.v1", {
    "PodSandboxMetadata": "string name = 1; string uid = 2; string namespace = 3",
    "NamespaceOption": "int32 network = 1; int32 pid = 2",
    "LinuxSandboxSecurityContext": "NamespaceOption namespace_options = 1; bool privileged = 6",
    "LinuxPodSandboxConfig": "string cgroup_parent = 1; LinuxSandboxSecurityContext security_context = 2",
    "PodSandboxConfig": "PodSandboxMetadata metadata = 1; string log_directory = 3; LinuxPodSandboxConfig linux = 8",
    "RunPodSandboxRequest": "PodSandboxConfig config = 1; string runtime_handler = 2",
    "RunPodSandboxResponse": "string pod_sandbox_id = 1",
    "ContainerMetadata": "string name = 1",
    "ImageSpec": "string image = 1",
    "KeyValue": "string key = 1; string value = 2",
    "Mount": "string container_path = 1; string host_path = 2; bool readonly = 3",
    "Int64Value": "int32 value = 1",
    "LinuxContainerSecurityContext": "bool privileged = 2; NamespaceOption namespace_options = 3; "
    "Int64Value run_as_user = 5",
    "LinuxContainerConfig": "LinuxContainerSecurityContext security_context = 2",
    "ContainerConfig": "ContainerMetadata metadata = 1; ImageSpec image = 2; repeated string command = 3; "
    "repeated KeyValue envs = 6; repeated Mount mounts = 7; string log_path = 11; LinuxContainerConfig linux = 15",
    "CreateContainerRequest": "string pod_sandbox_id = 1; ContainerConfig config = 2; "
    "PodSandboxConfig sandbox_config = 3",
    "CreateContainerResponse": "string container_id = 1",
    "ContainerRequest": "string container_id = 1; int32 timeout = 2",
    "ExecSyncRequest": "string container_id = 1; repeated string cmd = 2; int32 timeout = 3",
    "ExecSyncResponse": "string stdout = 1; string stderr = 2; int32 exit_code = 3",
    "PodRequest": "string pod_sandbox_id = 1",
    "Empty": "",
})  # fmt: skip


def archive(files: list[tuple[str, bytes | str | None]]) -> bytes:
    """A tar of programs, links (a text) and directories (None)."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as made:
        for name, what in files:
            one = tarfile.TarInfo(name)
            one.mode = 0o755
            if isinstance(what, bytes):
                one.size = len(what)
            else:
                one.type, one.linkname = (tarfile.DIRTYPE, "") if what is None else (tarfile.SYMTYPE, what)
            made.addfile(one, io.BytesIO(what) if isinstance(what, bytes) else None)
    return data.getvalue()


def image(pause: bytes) -> bytes:
    """Directories to mount this machine's at, and the pod's own program."""
    directories = [(name, None) for name in ("usr", "proc", "sys", "dev", "tmp", "etc", "run", "opt")]
    layer = archive([*directories, *((name, f"usr/{name}") for name in ("bin", "lib", "lib64")), ("pause", pause)])
    digest = "sha256:" + hashlib.sha256(layer).hexdigest()
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Cmd": ["/pause"]},
                         "rootfs": {"type": "layers", "diff_ids": [digest]}}).encode()  # fmt: skip
    name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = json.dumps([{"Config": name, "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]).encode()
    return archive([(name, config), ("layer.tar", layer), ("manifest.json", manifest)])


class Containerd:
    """One of its own below ``base``, with two runtimes: `runc` and `mpsagent`."""

    def __init__(self, base: Path, programs: Path, settings: str) -> None:
        self._base, self._programs, self._pods = base, programs, list[str]()
        self.parent = f"/mpsagent-pods-{os.getpid()}"
        base.mkdir(mode=0o755)
        (base / "containers.conf").write_text(f"PATH={programs}:$PATH\n{settings}\n")
        runtimes = {"runc": programs / "runc", "mpsagent": REPOSITORY / "packaging/containers/mpsagent-runtime"}
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        lines = [f'version = 2\nroot = "{base}/root"\nstate = "{base}/state"\n[grpc]\naddress = "{base}/sock"']
        lines += [f'[{cri}]\nsandbox_image = "{IMAGE}"\nrestrict_oom_score_adj = true\ndisable_apparmor = true']
        lines += [f'[{cri}.containerd]\nsnapshotter = "native"\ndefault_runtime_name = "runc"']
        for name, path in runtimes.items():
            lines.append(f'[{cri}.containerd.runtimes.{name}]\nruntime_type = "io.containerd.runc.v2"')
            lines.append(f'[{cri}.containerd.runtimes.{name}.options]\nBinaryName = "{path}"')
        (base / "config.toml").write_text("\n".join(lines) + "\n")
        libraries = os.pathsep.join(filter(None, [str(programs), os.environ.get("LD_LIBRARY_PATH")]))
        self._environment = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "LD_LIBRARY_PATH": libraries,
            "MPSAGENT_CONTAINERS_SETTINGS": str(base / "containers.conf"),
        }  # fmt: skip
        self._log = (base / "log").open("wb")
        self._process = subprocess.Popen(
            [programs / "containerd", "--config", base / "config.toml"], env=self._environment,
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def ready(self) -> bool:
        if self._process.poll() is not None:
            raise StageError(f"containerd has ended:\n{self.log()}")
        return (self._base / "sock").exists() and self._ctr("version").returncode == 0

    def begin(self) -> None:
        import grpc

        (self._base / "image.tar").write_bytes(image((self._programs / "pause").read_bytes()))
        done = self._ctr("image", "import", "--local", "--snapshotter", "native", str(self._base / "image.tar"))
        if done.returncode:
            raise StageError(f"no image: {done.stderr}")
        self._channel = grpc.insecure_channel(f"unix:{self._base}/sock")

    def _ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [self._programs / "ctr", "--address", self._base / "sock", "--namespace", "k8s.io", *words]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=60, check=False)

    def ask(self, name: str, request: Any, answer: str = "Empty", timeout: float = 60.0) -> Any:
        method = self._channel.unary_unary(
            f"/runtime.v1.RuntimeService/{name}", request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=CRI[answer].FromString,
        )  # fmt: skip
        return method(request, timeout=timeout)

    def start(self, uid: int, runtime: str, command: list[str], environment: dict[str, str], shown: list[str]) -> str:
        """A container in a pod of its own; its id. What it prints is in ``said``."""
        number = len(self._pods)
        namespaces = CRI["NamespaceOption"](network=HOST, pid=CONTAINER)
        pod = CRI["PodSandboxConfig"](
            metadata=CRI["PodSandboxMetadata"](name=f"pod{number}", uid=f"u{number}", namespace="default"),
            log_directory=str(self._base / "logs"),
            linux=CRI["LinuxPodSandboxConfig"](
                cgroup_parent=self.parent,
                security_context=CRI["LinuxSandboxSecurityContext"](namespace_options=namespaces, privileged=True),
            ),
        )
        request = CRI["RunPodSandboxRequest"](config=pod, runtime_handler=runtime)
        sandbox = self.ask("RunPodSandbox", request, "RunPodSandboxResponse").pod_sandbox_id
        self._pods.append(sandbox)
        rights = CRI["LinuxContainerSecurityContext"](
            privileged=True, namespace_options=namespaces, run_as_user=CRI["Int64Value"](value=uid)
        )  # the GPU's devices, as NVIDIA's runtime would give them
        container = CRI["ContainerConfig"](
            metadata=CRI["ContainerMetadata"](name="c"), image=CRI["ImageSpec"](image=IMAGE), command=command,
            envs=[CRI["KeyValue"](key=key, value=value) for key, value in environment.items()],
            mounts=[CRI["Mount"](container_path=path, host_path=path, readonly=True) for path in shown],
            log_path=f"{number}.log", linux=CRI["LinuxContainerConfig"](security_context=rights),
        )  # fmt: skip
        made = CRI["CreateContainerRequest"](pod_sandbox_id=sandbox, config=container, sandbox_config=pod)
        found = str(self.ask("CreateContainer", made, "CreateContainerResponse").container_id)
        self.ask("StartContainer", CRI["ContainerRequest"](container_id=found))
        return found

    def said(self) -> str:
        """By the last container."""
        path = self._base / "logs" / f"{len(self._pods) - 1}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def log(self) -> str:
        return (self._base / "log").read_text(errors="replace")[-2500:]

    def end(self) -> None:
        try:
            for pod in self._pods:
                self.ask("StopPodSandbox", CRI["PodRequest"](pod_sandbox_id=pod))
                self.ask("RemovePodSandbox", CRI["PodRequest"](pod_sandbox_id=pod))
        finally:
            self._process.terminate()
            self._process.wait(20)
            self._log.close()
            mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
            for path in reversed([one for one in mounts if one.startswith(f"{self._base}/")]):
                subprocess.run(["umount", "--lazy", path], check=False)
            for top in Path("/sys/fs/cgroup").glob(f"**{self.parent}"):
                for path, _, _ in os.walk(top, topdown=False):
                    with suppress(OSError):
                        Path(path).rmdir()


class Pods:
    """Rounds of one kind."""

    def __init__(self, stage: Stage, containerd: Containerd, uid: int, others: Sequence[int]) -> None:
        self.stage, self.agent, self.containerd = stage, stage.agents[-1], containerd
        self.uid, self.others = uid, others
        code = stage.place / "code"
        shutil.copytree(REPOSITORY / "mpsagent", code / "mpsagent", dirs_exist_ok=True)
        given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        given += [path for path in sys.path if path.endswith("site-packages")]
        found = [str(code), *(str(Path(path).absolute()) for path in given)]
        self.python = other_users_python(USERS[0])
        self.environment = {"PYTHONPATH": os.pathsep.join(found), "CUDA_MPS_PIPE_DIRECTORY": str(stage.rig.pipe)}
        if "LD_LIBRARY_PATH" in os.environ:
            self.environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        wanted = ["/usr", "/opt", "/etc/ld.so.cache", str(stage.place.parent), str(REPOSITORY), *found]
        wanted += [str(Path(one).resolve()) for one in found]
        wanted = sorted({one for one in wanted if Path(one).exists()})
        self.shown = [one for one in wanted if not any(one.startswith(f"{other}/") for other in wanted)]

    def round(self, kind: str) -> tuple[str, float, int, int]:
        """How the pod's client ended, after how many seconds, how many neighbours finished, and faults."""
        beside = [self.stage.client(uid, "mind", 600) for uid in self.others]
        for one in beside:
            one.known()
        script = f"trap 'kill $!; wait' TERM; {' '.join(self.stage.backend.client)} spin 600 & wait"
        runtime = "mpsagent" if kind == "runtime" else "runc"
        began = self.agent.mark()
        pod = self.containerd.start(self.uid, runtime, ["/bin/sh", "-c", script], self.environment, self.shown)
        try:
            self.stage.until(lambda: "launch" in self.containerd.said(), "a kernel of the pod is in flight", 30)
            self.agent.wait("client.connected", since=began, uid=self.uid)
        except StageError as error:
            raise StageError(f"{error}\n--- the container said\n{self.containerd.said()}") from None
        since = time.monotonic()
        if kind == "preStop":
            hook = [self.python, "-m", "mpsagent.cli.main", "--socket", str(self.agent.api.path)]
            hook += ["terminate", "--mine", "--timeout", "20s"]
            request = CRI["ExecSyncRequest"](container_id=pod, cmd=hook, timeout=30)
            self.containerd.ask("ExecSync", request, "ExecSyncResponse")  # it is killed where the container ends first
        self.containerd.ask("StopContainer", CRI["ContainerRequest"](container_id=pod, timeout=GRACE))
        took = time.monotonic() - since
        time.sleep(1.5)
        good = sum(one.finish() == 0 for one in beside)
        outcome = self.agent.wait("client.ended", since=began, uid=self.uid)["outcome"]
        return outcome, took, good, len(self.agent.found("server.fault", since=began))


def unpacked(packages: Path, to: Path) -> Path:
    if not packages.exists():
        raise rigs.RigError(f"no {packages}: campaigns/containerd_packages.sh makes it")
    with tarfile.open(packages) as packed:
        packed.extractall(to, filter="tar")
    return to


@contextmanager
def containerd_beside(stage: Stage, base: Path, programs: Path) -> Iterator[Containerd]:
    """A containerd whose runtime asks the stage's agent."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    words = f"env PYTHONPATH={path} {sys.executable} -m mpsagent.cli.main --socket {stage.agents[-1].api.path}"
    containerd = Containerd(base, programs, f'client="{words}"')
    try:
        stage.until(containerd.ready, "containerd answers", 30)
        containerd.begin()
        yield containerd
    except StageError as error:
        raise StageError(f"{error}\n--- containerd said\n{containerd.log()}") from None
    finally:
        containerd.end()


def main() -> int:
    arguments = parser(__doc__, 200.0)
    arguments.add_argument("--packages", type=Path, default=REPOSITORY / ".gpu/containerd/containerd.tar.xz")
    options = arguments.parse_args()
    rows, wrong, about = [], [], {}
    with place(options.sim) as (backend, machine, base):
        unpacked(options.packages, base / "programs")
        said = subprocess.run([base / "programs/containerd", "--version"], capture_output=True, text=True, check=False)
        about = {**facts(backend, machine), "containerd": " ".join(said.stdout.split()[2:])}
        signal.setitimer(signal.ITIMER_REAL, options.seconds)
        with Stage(backend, base / "stage", machine) as stage:
            try:
                stage.with_agent("[limits]\nactive_threads = '20%'\n", extra='sharing = "one-server"')
                with containerd_beside(stage, base / "ctd", base / "programs") as containerd:
                    pods = Pods(stage, containerd, USERS[0], USERS[1 : NEIGHBOURS + 1])
                    for kind in [one for one in ROUNDS if one in (options.only or ROUNDS)]:
                        for _ in range(ROUNDS[kind]):
                            outcome, took, good, faults = pods.round(kind)
                            rows.append((kind, outcome, took, good, faults))
                            print(*rows[-1], flush=True)
                            if kind != "without" and (good, faults) != (NEIGHBOURS, 0):
                                wrong.append(f"{kind}: {good} of {NEIGHBOURS} neighbours, {faults} faults")
            except (Exception, Broken) as error:
                wrong.append(re.sub(r"\s*$", "", f"{type(error).__name__}: {error}")[:5000])
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        wrong += stage.left
    text = "\n".join(["# Pods that are stopped", "", *(f"- {key}: {value}" for key, value in about.items()), ""])
    text += "\n| the pod is stopped | its client ended | after s | neighbours that finished | faults of MPS |\n"
    text += "|---|---|---|---|---|\n"
    text += "".join(
        f"| {k} | {how} | {took:.2f} | {good} of {NEIGHBOURS} | {faults} |\n" for k, how, took, good, faults in rows
    )
    for kind in ROUNDS:
        of = [row for row in rows if row[0] == kind]
        text += f"\n{kind}: {sum(row[3] for row in of)} of {len(of) * NEIGHBOURS} neighbours finished.\n"
    text += "".join(f"\nWRONG: {one}\n" for one in wrong if one)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "pod-stop.md").write_text(text)
    print(text)
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
