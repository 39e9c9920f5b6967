"""Policy files that a person names to check or try them, and files beside the policy that no agent reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from mpsagent.policy.origins import PolicyError
from mpsagent.system.policy_files import MOST_FILES, Texts, mistake, read_file


def passed_over(directory: Path) -> list[PolicyError]:
    """A warning for each file in a directory of the policy's parts that is not read because of its name. Hidden ones,
    a README and copies that were put aside (``x.toml.bak``, ``x.toml~``) are not meant to be. May block."""
    try:
        with os.scandir(directory) as entries:
            names = sorted(one.name for one in islice(entries, MOST_FILES))
    except OSError:
        return []
    hint = "name it like 10-students.toml, or put it elsewhere"
    over = [one for one in names if ".toml" not in one and not one.startswith((".", "README"))]
    return [mistake(directory / one, "is not read, because its name does not end in .toml", hint) for one in over]


def read_files(paths: Sequence[Path], *, judged: bool = True) -> tuple[Texts, list[PolicyError], list[PolicyError]]:
    """The texts of files that are named one by one, to check them; what the agent would refuse as well; and notes.

    A note is what an agent of root's would refuse, where the file is a draft of the user's own who checks it. Not
    ``judged``: whoever may have written them.
    """
    errors: list[PolicyError] = []
    notes: list[PolicyError] = []
    texts: Texts = []
    for path in paths[:MOST_FILES]:
        read_file(path, texts, errors, errors if judged and not _is_draft(path) else notes, own=0)
    if len(paths) > MOST_FILES:
        errors.append(mistake(paths[MOST_FILES], f"is one of more than {MOST_FILES} files", "check fewer at a time"))
    return texts, errors, notes if judged else []


def _is_draft(path: Path) -> bool:
    """Whether a file belongs to the user who runs this, who is not root."""
    try:
        return os.geteuid() != 0 and path.stat().st_uid == os.geteuid()
    except OSError:
        return False
