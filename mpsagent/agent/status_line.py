"""The state in a line, for ``systemctl status``."""

from __future__ import annotations

from collections.abc import Sequence

from mpsagent.agent.host import Agent
from mpsagent.core.words import Names
from mpsagent.snapshot.condition import Condition, problems


def one_line(agents: Sequence[Agent], conditions: Sequence[Condition], names: Names) -> str:
    found = problems(conditions)
    alone = len(agents) == len(agents[0].core.engines) == 1
    text = _of_one(agents[0]) if alone else _of_several(agents)
    return f"{found[0].text(names)} ({_many(len(found), 'problem')}); {text}" if found else text


def _of_several(agents: Sequence[Agent]) -> str:
    clients = sum(len(agent.state.clients) for agent in agents)
    waiting = sum(len(agent.core.view(None).waiting()) for agent in agents)
    apart = sum(len(agent.core.engines) - 1 for agent in agents)
    text = f"{len(agents)} instances, " if len(agents) > 1 else ""
    text += f"{_many(apart, 'user')} with a control daemon, " if apart else ""
    return text + f"{_many(clients, 'client')}, {_many(waiting, 'user')} {'waits' if waiting == 1 else 'wait'}"


def _of_one(agent: Agent) -> str:
    view = agent.core.view()
    users, waiting = view.state.users(), len(view.waiting())
    if view.turn is not None:
        count = len(view.state.clients_of_user(view.turn.uid))
        name = agent.people.name(view.turn.uid) or f"user {view.turn.uid}"
        text = f"{name} has the GPU with {_many(count, 'process', 'es')}"
    elif users:
        count = len(view.state.clients)
        verb = "works" if len(users) == 1 else "work"
        text = f"{_many(len(users), 'user')} {verb} with {_many(count, 'process', 'es')}"
    else:
        text = "no user has the GPU"
    return text + (f", {_many(waiting, 'user')} {'waits' if waiting == 1 else 'wait'}" if waiting else "")


def _many(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{'' if count == 1 else plural}"
