"""Writes the net again: ``.venv/bin/python -m tests.net``."""

from tests.net.test_net import HERE, everything

for old in HERE.glob("*/*.txt"):
    old.unlink()
for file, text in everything().items():
    (HERE / file).parent.mkdir(exist_ok=True)
    (HERE / file).write_text(text)
