"""Every scene by name."""

from __future__ import annotations

from tests.scenes import limits
from tests.scenes.stage import Scene

ALL: dict[str, Scene] = {scene.name: scene for module in (limits,) for scene in module.SCENES}
