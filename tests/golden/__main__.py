"""Write all golden files again, those of tests/net as well: `make golden`."""

import runpy

from tests.golden.surfaces import SURFACES
from tests.golden.test_golden import HERE

for name, text in SURFACES.items():
    (HERE / f"{name}.txt").write_text(text())
runpy.run_module("tests.net", run_name="__main__")
