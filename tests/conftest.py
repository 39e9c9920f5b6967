"""For all tests: signals as a terminal's user has them.

A shell ignores SIGINT and SIGQUIT for what it runs in the background, nohup ignores SIGHUP, and children inherit it:
programs under test would then not hear what the tests send.
"""

import signal

for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
