"""Every scene by name."""

from __future__ import annotations

from tests.scenes import ending, limits, turns
from tests.scenes.stage import Scene

ALL: dict[str, Scene] = {scene.name: scene for module in (limits, turns, ending) for scene in module.SCENES}
