"""Records as sentences: what happened, to whom, why, and what came of it. Pure. For the API, the command line and logs.

Transitions and actions declare their own sentences. The sentences of other records are declared here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from mpsagent.core.actions import Action
from mpsagent.core.transitions import Transition
from mpsagent.core.words import Names, Record, Sentence, Words
from mpsagent.mps.units import duration_text

_OWN = frozenset({"cursor", "seq", "at", "kind", "sentence", "user", "rule", "policy", "enforce", "start", "begun"})
_OF_ACTIONS = frozenset({"action", "action.done", "action.failed"})


def sentence(record: Record, names: Names = lambda uid: None) -> str:
    """Return one line, never empty. A record that this version does not know is told as a list of its fields."""
    name, kind, words = record.get("instance"), str(record.get("kind", "")), Words(record, names)
    where = "" if name is None or kind == "user.moved" else f"{name}: "
    try:
        if kind in _OF_ACTIONS:
            return where + _action(words)
        if (said := SENTENCES.get(kind)) is not None:
            return where + said(words)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        pass
    return _plain(where, words)


# --- records that are no transitions ----------------------------------------------------------------------------------


def _rejected(words: Words) -> str:
    errors = words["errors"]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    kept, first = words.get("kept") or "the one before stays in force", words.get("first") or errors[0]
    return f"the policy was rejected; {kept}: {first}{more}"


def _outside_ended(words: Words) -> str:
    name = {15: "SIGTERM", 9: "SIGKILL"}.get(words["signal"], "a signal")
    how = f"is sent {name}" if words.get("enforce") else f"would be sent {name}; the policy does not enforce this"
    return words("process {pid}{uid:of} ") + how + words(", because it uses the GPU outside MPS[: {text}]")


def _left(words: Words, key: str) -> str:
    """Return the time from the record to another one of its times."""
    return duration_text(max(0.0, words[key] - words["at"]))


_TEMPLATES = {
    "control.adopted": "control daemon {pid} was running already and was adopted",
    "control.restart_ordered": (
        "{by:user} ordered a restart of the control daemon[; clients get {timeout:span} to end by themselves]"
    ),
    "client.end_ordered": "{by:user} ordered the termination of client {pid}{uid:of}",
    "client.unlimited": "beyond its limits: {reason:text}",
    "client.environment": "its limits may not hold: {reason:text}",
    "user.flood": "{uid:user} comes, leaves or asks so often that only {most} such events a minute are recorded",
    "outside_mps": "process {pid}{uid:of} uses the GPU outside MPS, without limits[: {reason}]",
    "drain.ordered": (
        "{by:user} ordered a drain: no new client is admitted[; clients still at work after {timeout:span} are ended]"
    ),
    "drain.resumed": "{by:user} ended the drain",
}
SENTENCES: Mapping[str, Sentence] = {
    **{one.kind: one.sentence for one in Transition.__subclasses__()},
    **{kind: operator.methodcaller("__call__", template) for kind, template in _TEMPLATES.items()},
    "journal.left_out": lambda words: (
        words("{count} lines about ")
        + words("{uid:user}" if "uid" in words.record else "{users} other users")
        + " were left out of the journal in the last hour, because it takes a bounded number for each user: "
        "mpsagent-cli events shows all"
    ),
    "policy.loaded": lambda words: (
        f"the policy was loaded from {', '.join(words['files']) or 'the defaults'} ({str(words['digest'])[:12]})"
    ),
    "policy.rejected": _rejected,
    "outside_mps.warned": lambda words: (
        words("process {pid}{uid:of} uses the GPU outside MPS and is ended in ") + _left(words, "ends")
    ),
    "outside_mps.ended": _outside_ended,
    "turn.extended": lambda words: (
        words("{by:user} extended the turn of {uid:user}: it does not end within ") + _left(words, "until")
    ),
}
KINDS = frozenset(SENTENCES) | _OF_ACTIONS
"""Kinds of records that have a sentence."""


# --- actions ----------------------------------------------------------------------------------------------------------

PHRASES: Mapping[str, Sentence] = {one.__name__: one.sentence for one in Action.__subclasses__()}


def _action(words: Words) -> str:
    name = str(words.get("action") or "an action")
    phrase = (PHRASES[name](words) if name in PHRASES else "") or name
    if words.get("enforce") is False:
        phrase = f"report mode, would have {phrase}"
    reason = words("{reason:text}")
    if name in ("SignalClient", "SignalHeld", "WarnClient"):
        reason = reason.rpartition("; ")[0] or reason  # it says itself which signal to whom
    text = f"{phrase}: {reason}" if reason else phrase
    if words.get("kind") == "action":
        return f"{text} (begun)"
    answer = words("{text:text}").strip()
    if words.get("ok") is False:
        return f"{text}; it failed{f': {answer}' if answer else ''}"
    return text


def _plain(where: str, words: Words) -> str:
    """Return a sentence for an unknown kind: its reason or text, otherwise its fields."""
    if said := words("{reason:text}") or words("{text:text}"):
        return where + said
    rest = ", ".join(
        f"{key} {value}" for key, value in words.record.items() if key not in _OWN and value not in (None, "", [], {})
    )
    return f"{words.get('kind') or 'an event'}{f': {rest}' if rest else ''}"
