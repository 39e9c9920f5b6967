"""The agent starts without the certificates of the machine; whoever wants them later has them."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import ssl
before = len(ssl.create_default_context().get_ca_certs())
import sys
from mpsagent.interfaces import daemon
assert "aiohttp" not in sys.modules
with daemon.none_loaded():
    none = len(ssl.create_default_context().get_ca_certs())
    from mpsagent.interfaces.api import Api
print(before - len(ssl.create_default_context().get_ca_certs()), none)
"""


def test_certificates_are_not_loaded_with_the_server_and_can_be_had_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "0"]
