"""What `make` does to the services of the machine on which it installs packages: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.booted.machine import Machine

SCRIPT = Path(__file__).resolve().parents[2] / "packaging" / "install-packages.sh"
UNIT = """[Service]
ExecStart=/bin/sleep infinity
[Install]
WantedBy=multi-user.target
"""
USERS_UNIT = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=default.target\n"
INIT_SCRIPT = """#!/bin/sh
### BEGIN INIT INFO
# Provides: sample
# Required-Start:
# Required-Stop:
# Default-Start: 2 3 4 5
# Default-Stop: 0 1 6
### END INIT INFO
exit 0
"""
# As debhelper writes it for packages like munge and podman.
POSTINST = """#!/bin/sh
set -e
update-rc.d sample defaults >/dev/null
if deb-systemd-helper --quiet was-enabled sample.service; then
    deb-systemd-helper enable sample.service >/dev/null
fi
deb-systemd-helper --user enable sample-user.service >/dev/null
systemctl --system daemon-reload
deb-systemd-invoke start sample.service >/dev/null || true
"""
CONTROL = """Package: sample
Version: 1
Architecture: all
Maintainer: nobody <nobody@localhost>
Description: sample
"""
REPOSITORY = r"""
set -e
mkdir -p /srv/repository /etc/rc0.d /etc/rc1.d /etc/rc2.d /etc/rc3.d /etc/rc4.d /etc/rc5.d /etc/rc6.d
cd /srv/repository
dpkg-deb --build /root/sample sample.deb >/dev/null
{ cat /root/sample/DEBIAN/control
  printf 'Filename: ./sample.deb\nSize: %s\n' "$(stat -c %s sample.deb)"
  printf 'SHA256: %s\n' "$(sha256sum sample.deb | cut -c-64)"
} >Packages
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d
echo 'deb [trusted=yes] file:/srv/repository ./' >/etc/apt/sources.list
"""
FORBIDS_OTHERS = '#!/bin/sh\n[ "$1" != other ] || exit 101\n'


@pytest.fixture
def repository(machine: Machine) -> Machine:
    machine.write("/root/sample/lib/systemd/system/sample.service", UNIT)
    machine.write("/root/sample/usr/lib/systemd/user/sample-user.service", USERS_UNIT)
    machine.write("/root/sample/etc/init.d/sample", INIT_SCRIPT, 0o755)
    machine.write("/root/sample/DEBIAN/postinst", POSTINST, 0o755)
    machine.write("/root/sample/DEBIAN/control", CONTROL)
    machine.run("sh", "-c", REPOSITORY)
    machine.write("/root/install-packages.sh", SCRIPT.read_text(), 0o755)
    return machine


def started(machine: Machine) -> dict[str, object]:
    return {
        "active": machine.systemctl("is-active", "sample.service", check=False),
        "enabled": machine.systemctl("is-enabled", "sample.service", check=False),
        "for users": machine.systemctl("--global", "is-enabled", "sample-user.service", check=False),
        "by other inits": machine.run("sh", "-c", "ls /etc/rc?.d | grep 'S..sample' || true").stdout.split() != [],
    }


@pytest.mark.parametrize("policy", [None, FORBIDS_OTHERS], ids=["no policy-rc.d", "a policy-rc.d of the site"])
def test_a_package_that_the_tests_need_enables_and_starts_nothing(repository: Machine, policy: str | None) -> None:
    """`make test` left munge.service running and five units of podman and Slurm enabled."""
    if policy is not None:
        repository.write("/usr/sbin/policy-rc.d", policy, 0o755)
    repository.run("/root/install-packages.sh", "sample")
    off = {"active": "inactive", "enabled": "disabled", "for users": "disabled", "by other inits": False}
    assert started(repository) == off
    left = repository.path("/usr/sbin/policy-rc.d")
    assert (left.read_text() if left.exists() else None) == policy
    # Installed again by its administrator, without the script, it starts.
    repository.run("sh", "-c", "dpkg --purge sample; rm -rf /var/lib/systemd/deb-systemd-*-enabled /etc/rc?.d/*; "
                               "apt-get -qq install -y sample >/dev/null")  # fmt: skip
    on = {"active": "active", "enabled": "enabled", "for users": "enabled", "by other inits": True}
    assert started(repository) == on


def test_a_script_that_was_killed_forbids_nothing(repository: Machine) -> None:
    """Its policy-rc.d stays then, and the services of other packages are to start."""
    repository.write("/usr/sbin/policy-rc.d", FORBIDS_OTHERS, 0o755)
    repository.write("/usr/local/sbin/apt-get", "#!/bin/sh\n/usr/sbin/policy-rc.d sample start; echo $? >/root/during\n"
                                                "kill -KILL $PPID\n", 0o755)  # fmt: skip
    assert repository.run("/root/install-packages.sh", "sample", check=False).returncode != 0
    assert repository.path("/root/during").read_text() == "101\n"
    policy = ("/usr/sbin/policy-rc.d",)
    assert repository.run(*policy, "sample", "start", check=False).returncode == 0
    assert repository.run(*policy, "other", "start", check=False).returncode == 101
    repository.run("rm", "/usr/local/sbin/apt-get")
    repository.run("/root/install-packages.sh", "sample")
    assert repository.path("/usr/sbin/policy-rc.d").read_text() == FORBIDS_OTHERS
