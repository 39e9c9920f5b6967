"""What an order has come to, as a person reads it. Pure."""

from __future__ import annotations

from datetime import datetime
from textwrap import wrap
from typing import Any

from mpsagent.cli.answer_text import PAGE
from mpsagent.cli.wording import Json, local, safe, user


def answered(answer: Json, now: datetime) -> list[str]:
    """What an order has come to; an answer of another shape as it is."""
    if answer.get("draining") is True:
        if answer.get("deadline"):
            return [f"No new client is admitted. Clients still at work at {local(answer['deadline'], now)} are ended."]
        return ["No new client is admitted until mpsagent-cli resume. Clients at work end by themselves."]
    if answer.get("draining") is False:
        return [
            "Waiting users are admitted." if answer.get("drained", True) else "There was no drain: nothing has changed."
        ]
    if "digest" in answer and "files" in answer:
        files = ", ".join(safe(one) for one in answer["files"]) or "no file: the defaults"
        what = f"{safe(answer['digest'] or '-')[:12]}, from {files}"
        if not answer.get("later"):
            return [f"The policy is in force: {what}"]
        later = f"{safe(answer['later'], 400)}: systemctl restart mpsagent (no CUDA work is lost)"
        return [f"The policy is loaded: {what}", f"Not yet in force: {later}"]
    if "ending" in answer:
        verb = "would be" if answer["dry_run"] else "is being"
        each = [f"Client {one['pid']} of {user(one)} {verb} ended." for one in answer["ending"]]
        return each or ["no client: nothing is to be ended"]
    if "until" in answer and "uid" in answer and "id" not in answer:
        return [f"The turn of {user(answer)} does not end before {local(answer['until'], now)}."]
    if "steps" in answer and "dry_run" in answer:
        return _ending(answer)
    return tree(answer)


def _ending(answer: Json) -> list[str]:
    """How a client is ended, or would be."""
    server = "" if answer.get("server") is None else f" at server {answer['server']}"
    verb = "would be" if answer["dry_run"] else "is being"
    return _steps(f"Client {answer['pid']} of {user(answer)}{server} {verb} ended, until it has gone:", answer)


def _steps(first: str, answer: Json) -> list[str]:
    lines = wrap(first, PAGE)
    for number, step in enumerate(answer["steps"], 1):
        lines += wrap(f"{number}. {safe(step, 400)}", PAGE - 2, initial_indent="  ", subsequent_indent="     ")
    return lines


def tree(value: Any, indent: str = "") -> list[str]:
    """Any JSON as indented ``key: value`` lines, for answers whose shape is the policy's."""
    lines: list[str] = []
    pairs = value.items() if isinstance(value, dict) else [("-", each) for each in value]
    for key, each in pairs:
        name = safe(key, 60) if key == "-" else f"{safe(key, 60)}:"
        if isinstance(each, dict | list) and each:
            lines += [f"{indent}{name}", *tree(each, indent + "  ")]
        else:
            shown = (
                "-"
                if each in (None, [], {})
                else {True: "yes", False: "no"}.get(each, each)
                if isinstance(each, bool)
                else each
            )
            text = f"{indent}{name} {safe(shown, 400)}"
            lines += wrap(text, PAGE, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
    return lines
