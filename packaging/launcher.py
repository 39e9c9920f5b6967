"""Writes a program's start script for a package: launcher.py MODULE:FUNCTION FLAGS > program.

The script takes its libraries from the package alone, but for what the distribution provides (pystemd). -I keeps
PYTHON* variables and the user's own site directory out of a program that root runs; the command line, which needs
nothing of the distribution's, leaves out site altogether (-IS) and starts sooner.
"""

import sys

SCRIPT = """\
#!/usr/bin/python3 {flags}
import sys

home = "/usr/lib/mpsagent/lib"
version = "python%d.%d" % sys.version_info[:2]
sys.path.insert(0, home + "/" + version)
try:
    from {module} import {function}
except ImportError as error:
    import os

    if os.path.isdir(home + "/" + version):
        raise
    carried = ", ".join(sorted(os.listdir(home)))
    sys.exit("mpsagent: this package carries libraries for %s; /usr/bin/python3 is %s (%s). "
             "Install the package for this release." % (carried, version, error))
sys.exit({function}())
"""


def main() -> None:
    entry, flags = sys.argv[1:]
    module, function = entry.split(":")
    sys.stdout.write(SCRIPT.format(flags=flags, module=module, function=function))


if __name__ == "__main__":
    main()
