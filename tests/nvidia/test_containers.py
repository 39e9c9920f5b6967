"""Containers of podman before NVIDIA's own daemons: NVIDIA's libcuda in them finds the gate by the CDI file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.stage import Stage
from tests.nvidia.daemon import USER, client_words
from tests.nvidia.fetch import Driver
from tests.nvidia.page import saw
from tests.scenes.containers import Podman, why_not, why_not_mapped

pytestmark = pytest.mark.root

REFUSED = 805


@pytest.mark.parametrize("mapped", [False, True], ids=["user", "user-namespace"])
def test_a_container_reaches_the_daemon_as_its_user(stage: Stage, nvidia: Driver, tmp_path: Path, mapped: bool) -> None:
    """Held, known by user and the host's pid, handed over with its limits; no server starts without a GPU, so in the
    end it is turned away: NVIDIA's libcuda in the container gets its error, and does not go on outside MPS."""
    if why := why_not(tmp_path) or (why_not_mapped() if mapped else None):
        pytest.skip(why)
    agent = stage.with_agent(f"[user.{USER}]\nactive_threads = '20%'\n")
    podman = Podman(stage.place / "podman", [nvidia.root])
    code, text = stage.cli(agent, "env", "--format", "cdi")
    assert code == 0, text
    podman.spec.write_text(text)
    words = client_words(nvidia, python=podman.python)
    found = stage.rig.run(podman.command(USER, *words, mapped=mapped, environment=nvidia.environment()))
    knock = stage.record("client.waiting", uid=USER)
    assert Path(f"/proc/{knock['pid']}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink()
    assert stage.record("client.refused", pid=knock["pid"])["uid"] == USER
    stage.until(lambda: found.process.poll() is not None, "the container has ended")
    assert found.read().split() == [str(REFUSED)], found.err.read_text()
    log = (stage.rig.log / "control.log").read_text()
    assert log.index("set_default_active_thread_percentage 20") < log.index(f"from user {USER}: Server is not ready")
    words = f"known by user and host's pid, handed over as that user; libcuda hears {REFUSED} without a GPU"
    saw(nvidia, "podman: `--user`, and root of a user namespace, by the CDI file", words)
