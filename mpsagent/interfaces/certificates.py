"""aiohttp without certificates: when it is imported it loads those of the machine, twice, for a client's connections.

The agent makes none. They are a tenth of a second of each start, and 2 MB of memory.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

_LOADERS = ("load_default_certs", "set_default_verify_paths")


@contextmanager
def none_loaded() -> Iterator[None]:
    """Contexts that are made meanwhile trust nobody: a client that used one by mistake would be refused."""
    own = {name: vars(ssl.SSLContext)[name] for name in _LOADERS if name in vars(ssl.SSLContext)}
    for name in _LOADERS:
        setattr(ssl.SSLContext, name, _nothing)
    try:
        yield
    finally:
        for name in _LOADERS:
            delattr(ssl.SSLContext, name)
        for name, loader in own.items():
            setattr(ssl.SSLContext, name, loader)


def _nothing(context: ssl.SSLContext, *_: object) -> None:
    return None
