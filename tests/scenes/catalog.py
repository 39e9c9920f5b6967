"""Every scene by name."""

from __future__ import annotations

from tests.scenes import ending, hangs, jobs, limits, together, turns
from tests.scenes.stage import Scene

MODULES = (limits, turns, together, jobs, ending, hangs)
ALL: dict[str, Scene] = {scene.name: scene for module in MODULES for scene in module.SCENES}
