"""What a policy file may hold: its sections and keys, for checking (pydantic) and for editors (JSON Schema).

Each value is checked by a function of ``policy_parse``, whose messages are made for people; pydantic walks the tables,
finds unknown keys and collects everything that is wrong.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from mpsagent.policy import parse, values
from mpsagent.policy.policy import Path

_DURATION = r"^\s*(\d+(\.\d+)?\s*(ms|s|min|m|h|d)\s*)+$"
_SIZE = r"^\s*\d+(\.\d+)?\s*([KMGT](i?B)?|%)\s*$"
_AMOUNT = {"type": "string", "pattern": _SIZE}


def _duration(low: float, high: float) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(parse.duration(low, high)), WithJsonSchema({"type": "string", "pattern": _DURATION})


def _or_never(low: float, high: float) -> tuple[PlainValidator, WithJsonSchema]:
    schema = {"anyOf": [{"const": parse.NEVER}, {"type": "string", "pattern": _DURATION}]}
    return PlainValidator(parse.duration(low, high, never=True)), WithJsonSchema(schema)


def _words(*words: str) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(parse.choice(*words)), WithJsonSchema({"enum": list(words)})


def _path(longest: int) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(parse.path(longest)), WithJsonSchema({"type": "string", "pattern": "^/"})


_TEXT = WithJsonSchema({"type": "string", "minLength": 1})
Flag = Annotated[object, PlainValidator(parse.flag), WithJsonSchema({"type": "boolean"})]
Threads = Annotated[
    object,
    PlainValidator(parse.threads),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": values.LEAST_PERCENT, "maximum": 100},
                {
                    "type": "object",
                    "properties": {"sms": {"type": "integer", "minimum": 2}},
                    "required": ["sms"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {
                        "clients": {"type": "integer", "minimum": 1, "maximum": 1000},
                        "rule": {"enum": ["even", "double"]},
                    },
                    "required": ["clients"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"weight": {"type": "number", "exclusiveMinimum": 0}},
                    "required": ["weight"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
Memory = Annotated[
    object,
    PlainValidator(parse.memory),
    WithJsonSchema({"anyOf": [_AMOUNT, {"type": "object", "minProperties": 1, "additionalProperties": _AMOUNT}]}),
]
MaxClients = Annotated[
    object, PlainValidator(parse.whole(1, 1000)), WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 1000})
]
Deadline = Annotated[object, *_duration(0.1, 86400)]
Devices = Annotated[
    object, PlainValidator(parse.device_list), WithJsonSchema({"type": "array", "items": {"type": "string"}})
]
Name = Annotated[str, AfterValidator(parse.name)]
User = Annotated[str, AfterValidator(parse.user)]


class Section(BaseModel):
    """A table. Every key may be missing; TOML has no null, so None is never a value that was written."""

    model_config = ConfigDict(extra="forbid")


class LimitsSection(Section):
    """What one client process may use, and what one user may do."""

    threads: Threads = Field(None, description="share of the multiprocessors of each client process, in percent")
    memory: Memory = Field(None, description="device memory of each client process, by device or for all devices")
    max_clients: MaxClients = Field(None, description="client processes of one user at a time")
    max_runtime: Annotated[object, *_or_never(1, 10 * parse.YEAR)] = Field(
        None, description="a client process is ended after this time"
    )
    idle_timeout: Annotated[object, *_or_never(1, 10 * parse.YEAR)] = Field(
        None, description="end a user's clients that used no CPU for this long while somebody waits"
    )
    enforce: Flag = Field(None, description="false: only report what would be done")


class SwitchSection(Section):
    """When the GPU goes to the next user who waits."""

    after: Annotated[object, *_or_never(0, 10 * parse.YEAR)] = Field(
        None, description="how long a user may keep the GPU once somebody else waits"
    )
    grace: Annotated[object, *_duration(0, 86400)] = Field(None, description="time between the warning and the action")
    action: Annotated[object, *_words("terminate", "quit", "none")] = Field(
        None, description="terminate: end each client; quit: restart the control daemon; none: only warn"
    )
    exempt: Flag = Field(None, description="true: the GPU is never taken from this user")
    enforce: Flag = Field(None, description="false: only report what would be done")


class WhoSection(LimitsSection):
    """A user or a group: the keys of [limits], and switch.after and so on."""

    switch: SwitchSection = Field(None, description="when the GPU goes to the next user")  # type: ignore[assignment]


class HangSection(Section):
    """How long each part of MPS may stay silent."""

    control: Deadline = Field(None, description="the control daemon answers a command")
    server: Deadline = Field(None, description="a server answers")
    server_ready: Deadline = Field(None, description="a server gets ready (default: as `server`)")
    fault: Deadline = Field(None, description="clients with a sticky error leave by themselves")
    exit: Deadline = Field(None, description="a server exits after its shutdown")
    quit: Deadline = Field(None, description="`quit` returns")
    terminate: Deadline = Field(None, description="`terminate_client` succeeds")
    kill_grace: Annotated[object, *_duration(0, 86400)] = Field(None, description="time between SIGTERM and SIGKILL")
    enforce: Flag = Field(None, description="false: only report what would be done")


class InstanceSection(Section):
    """One control daemon."""

    devices: Devices = Field(None, description="UUIDs of the GPUs it serves; empty: all")
    compute_mode: Annotated[object, *_words("default", "exclusive-process")] = Field(
        None, description="compute mode that the GPUs should have: verified, never changed"
    )
    # A Unix socket's path has at most 107 bytes, and "/control_privileged" comes behind this one.
    pipe_directory: Annotated[object, *_path(88)] = Field(None, description="as CUDA_MPS_PIPE_DIRECTORY of the clients")
    log_directory: Annotated[object, *_path(1024)] = Field(None, description="where control.log and server.log are")
    control_program: Annotated[object, PlainValidator(parse.program), _TEXT] = Field(
        None, description="nvidia-cuda-mps-control, or its absolute path"
    )


class AgentSection(Section):
    """The agent itself."""

    enforce: Flag = Field(None, description="false: nothing is enforced, only reported")
    on_stop: Annotated[object, *_words("leave", "quit")] = Field(
        None, description="what happens to MPS when the agent is stopped"
    )
    stop_timeout: Annotated[object, *_duration(0, 86400)] = Field(
        None, description="with on_stop = quit: how long clients may take"
    )
    admin_group: Annotated[object, PlainValidator(parse.name), _TEXT] = Field(
        None, description="its members may do what root may do"
    )
    parked_user: Annotated[object, PlainValidator(parse.parked), _TEXT] = Field(
        None, description="the system user of the server that runs while nobody has one"
    )


class HooksSection(Section):
    """Programs of yours."""

    before_end: Annotated[object, *_path(1024)] = Field(None, description="run before a client is ended by force")
    deadline: Annotated[object, *_duration(0.1, 600)] = Field(None, description="how long such a program may take")


class PolicyFile(Section):
    """A policy of mpsagent."""

    enforce: Flag = Field(None, description="false: nothing is enforced, only reported")
    limits: LimitsSection = Field(None, description="everybody")  # type: ignore[assignment]
    user: dict[User, WhoSection] = Field(default_factory=dict, description="by name or uid")
    group: dict[Name, WhoSection] = Field(default_factory=dict, description="by name")
    switch: SwitchSection = Field(None, description="when the GPU goes to the next user")  # type: ignore[assignment]
    hang: HangSection = Field(None, description="how long each part of MPS may be silent")  # type: ignore[assignment]
    instance: dict[Name, InstanceSection] = Field(default_factory=dict, description="one control daemon")
    agent: AgentSection = Field(None, description="the agent itself")  # type: ignore[assignment]
    hooks: HooksSection = Field(None, description="programs of yours")  # type: ignore[assignment]


def schema() -> dict[str, Any]:
    """The JSON Schema of a policy file, for editors."""
    answer = _tidy(PolicyFile.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **answer}


def _tidy(part: Any) -> Any:
    if isinstance(part, dict):
        return {k: _tidy(v) for k, v in part.items() if not (k == "default" and v is None) and k != "title"}
    return [_tidy(one) for one in part] if isinstance(part, list) else part


SECTIONS: dict[str, type[Section]] = {
    "limits": LimitsSection,
    "switch": SwitchSection,
    "hang": HangSection,
    "agent": AgentSection,
    "hooks": HooksSection,
    "instance.NAME": InstanceSection,
}


def section_at(path: Path) -> type[Section]:
    """The section whose keys belong at a path."""
    if not path:
        return PolicyFile
    if path[-1] == "switch":
        return SwitchSection
    if path[0] in ("user", "group"):
        return WhoSection
    return InstanceSection if path[0] == "instance" else SECTIONS.get(path[0], PolicyFile)
