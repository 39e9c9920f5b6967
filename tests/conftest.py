"""For all tests: signals as a terminal's user has them, and no test that fails because the machine is slow.

A shell ignores SIGINT and SIGQUIT for what it runs in the background, nohup ignores SIGHUP, and children inherit it:
programs under test would then not hear what the tests send.
"""

import signal

from hypothesis import HealthCheck, settings

# An example may take long when other programs have the processors; the usual bound is 200 ms.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
