"""Reads the policy's files: /etc/mpsagent/policy.toml, then policy.d/*.toml in the order of their names.

Only reads; ``policy.files.load`` makes a policy of the texts. Everything is bounded (number of files, size), and a FIFO
or a device in place of a file is refused rather than waited for. The agent, `mpsagent-cli policy check` and systemd's
generator read by the same functions, so that all judge alike.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mpsagent.policy.origins import PolicyError, printable

LARGEST = 1 << 20
"""Bytes read of one file; ``load`` refuses less than that with a better message."""
MOST_FILES = 256
HIDDEN = ("/root", "/home", "/run/user")
"""Directories that ProtectHome= hides."""

Texts = list[tuple[str, str]]


def read_policy(policy: Path, own: int | None = None) -> tuple[Texts, list[PolicyError]]:
    """The texts of ``policy`` and of ``policy.d`` beside it, as (path, text), and what could not be read. A missing
    ``policy`` is an error: without it every user could use everything. What others than root and ``own`` (a uid; None:
    the user who runs this) could have written is refused: the policy names programs that root runs."""
    errors: list[PolicyError] = list(_parents(policy, own))
    texts: Texts = []
    if errors:
        return texts, errors
    if _exists(policy, errors):
        read_file(policy, texts, errors, errors, own)
    elif not errors:
        hint = "restore it from the package or a backup; a file with comments alone means: the defaults for all users"
        errors.append(mistake(policy, "is missing", hint))
    for path in _parts(policy.with_suffix(".d"), errors, own):
        wrong = list(_parents(path, own))
        errors += [one for one in wrong if one not in errors]
        if not wrong:
            read_file(path, texts, errors, errors, own)
    return texts, errors


def _parents(path: Path, own: int | None) -> Iterator[PolicyError]:
    """Yield the mistakes of the directories above a path, and above the file that a link leads to: who can write there
    puts another file in its place. In a directory with the sticky bit nobody replaces root's file, and on a read-only
    file system, like the ConfigMap of a pod, nobody replaces any."""
    path = path.absolute()
    with suppress(OSError, RuntimeError):  # a loop of links gets its error when it is read
        for step in dict.fromkeys((*path.parents, *path.resolve().parents)):
            status = step.stat()
            problem = _distrust(status, own)
            written = problem is not None and _distrust(_without_write(status), own) is None
            spared = status.st_mode & stat.S_ISVTX or os.statvfs(step).f_flag & os.ST_RDONLY
            if problem is not None and not (written and spared):
                yield mistake(step, *problem)


def _without_write(status: os.stat_result) -> os.stat_result:
    return os.stat_result((status.st_mode & ~(stat.S_IWOTH | stat.S_IWGRP), *status[1:]))


def linked(path: Path) -> PolicyError | None:
    """Return the mistake of a link that leads to a place that the agent's unit hides from it; None: it does not."""
    try:
        target = path.parent / path.readlink()
    except OSError:
        return None
    if not any(target.is_relative_to(one) for one in HIDDEN):
        return None
    problem = f"is a link to {_name(target)}, where the agent cannot read: its unit has ProtectHome=yes"
    return mistake(
        path, problem, "copy the file here, or link to one in a directory like /srv that every user may enter"
    )


def mistake(path: Path, problem: str, hint: str) -> PolicyError:
    return PolicyError(_name(path), 0, "", problem, hint)


def _name(path: Path) -> str:
    """A path as text that is safe to print, whatever bytes and control characters the name has."""
    return printable(os.fsencode(path).decode("utf-8", "backslashreplace"))


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _exists(path: Path, errors: list[PolicyError]) -> bool:
    """Whether there is anything at a path; a link to nowhere is something, and gets its error when it is read."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        errors.append(mistake(path, f"cannot be read: {_reason(error)}", "see who may enter its directories"))
        return False
    return True


def _parts(directory: Path, errors: list[PolicyError], own: int | None) -> list[Path]:
    """The *.toml files of a directory in the order of their names; hidden ones (editors' copies) are left out."""
    if not _exists(directory, errors):
        return []
    try:
        if problem := _distrust(directory.stat(), own):
            errors.append(mistake(directory, *problem))
            return []
        with os.scandir(directory) as entries:
            names = sorted(e.name for e in entries if e.name.endswith(".toml") and not e.name.startswith("."))
    except OSError as error:
        errors.append(mistake(directory, f"cannot be read: {_reason(error)}", "make it a directory that root may read"))
        return []
    if len(names) > MOST_FILES:
        errors.append(mistake(directory, f"has more than {MOST_FILES} files", "join some of them"))
    return [directory / name for name in names[:MOST_FILES]]


def _distrust(status: os.stat_result, own: int | None = None) -> tuple[str, str] | None:
    """Why another user could have written this, with a hint; None when only root and ``own`` could (None: the user who
    runs this)."""
    if status.st_uid not in (0, os.geteuid() if own is None else own):
        return f"belongs to uid {status.st_uid}, and root does what it says", "chown it to root"
    if status.st_mode & stat.S_IWOTH:
        return "may be written by everybody, and root does what it says", "chmod o-w"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in (0, os.getegid() if own is None else own):
        return f"may be written by group {status.st_gid}, and root does what it says", "chmod g-w"
    return None


def read_file(
    path: Path, texts: Texts, errors: list[PolicyError], distrust: list[PolicyError], own: int | None = None
) -> None:
    """Append the text of a file, or what is wrong with it. Who could have written it goes to ``distrust``; where that
    is not ``errors``, the text is read all the same."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # some devices do something already when they are opened
            errors.append(mistake(path, "is not a regular file", "put a file there, or a link to one"))
            return
        # O_NONBLOCK: it may have become a FIFO meanwhile, and opening one must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                errors.append(mistake(path, "is not a regular file", "put a file there, or a link to one"))
                return
            if problem := _distrust(status, own):
                distrust.append(mistake(path, *problem))
                if distrust is errors:
                    return
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        hint = "see that it exists, and a link's target too"
        errors.append(linked(path) or mistake(path, "cannot be read: no such file", hint))
        return
    except PermissionError as error:
        hint = "chown it to root, chmod 0644: the agent has no right to read what its owner alone may"
        errors.append(linked(path) or mistake(path, f"cannot be read: {_reason(error)}", hint))
        return
    except OSError as error:
        errors.append(mistake(path, f"cannot be read: {_reason(error)}", "see that it exists"))
        return
    if len(data) > LARGEST:
        errors.append(mistake(path, f"is larger than {LARGEST >> 10} KiB", "is it a policy at all?"))
        return
    try:
        texts.append((_name(path), data.decode("utf-8")))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        what = "is UTF-16 and not UTF-8 text" if utf16 else "is not UTF-8 text"
        errors.append(PolicyError(_name(path), line, "", what, "save the file as UTF-8"))
