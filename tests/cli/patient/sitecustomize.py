"""On the PYTHONPATH of programs in the tests of completions: a machine that is busy with other tests answers late."""

from mpsagent.cli import complete

complete.PATIENCE = 60.0
