"""Commands and answers of the control daemon, with the texts of the recordings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.mps import commands as replies
from mpsagent.mps.commands import ClientRow, Refusal, RefusalKind
from mpsagent.mps.limits import Limits
from mpsagent.mps.units import GIB, MIB, percent_text


def daemon(commands: list[str]) -> str:
    """What the real daemon answers to a batch of sets and gets (recordings 01, S2 and 02, R1)."""
    percent, memory, out = "100.0", {}, ""
    for command in commands:
        match command.split():
            case ["set_default_active_thread_percentage", value]:
                percent = percent_text(float(value)) if 0 < float(value) <= 100 else percent
                out += f"{percent}\n"
            case ["set_active_thread_percentage", _, value]:
                percent = percent_text(float(value))
                out += f"{percent}\n"
            case ["set_default_device_pinned_mem_limit", device, value] | [
                "set_device_pinned_mem_limit",
                _,
                device,
                value,
            ]:
                if value in ("0G", "0M"):
                    memory.pop(device, None)
                elif value[:-1].isdigit() and value[-1] in "MG":
                    size = int(value[:-1]) * (GIB if value[-1] == "G" else MIB)
                    memory[device] = f"{size // GIB}G" if size % GIB == 0 else f"{size // MIB}M"
                else:
                    memory[device] = "1M"
            case ["get_default_active_thread_percentage"] | ["get_active_thread_percentage", _]:
                out += f"{percent}\n"
            case ["get_default_device_pinned_mem_limit", device] | ["get_device_pinned_mem_limit", _, device]:
                out += f"{memory[device]}\n" if device in memory else ""
            case _:
                out += f'Unknown command "{command}"\n'
    return out


limits = st.builds(
    Limits,
    threads=st.floats(0.1, 100),
    memory=st.dictionaries(st.integers(0, 7), st.one_of(st.just(0), st.integers(MIB, 200 * GIB)), max_size=4),
)
devices = st.frozensets(st.integers(0, 7), max_size=4)


@given(limits, devices)
def test_what_was_set_is_confirmed(wanted: Limits, also: frozenset[int]) -> None:
    """Any limits, any devices, with and without a limit: a faithful daemon's answer is a confirmation."""
    assert replies.check_defaults(wanted, daemon(replies.set_defaults(wanted, also)), also) is None
    answer = daemon(replies.set_server_limits(565, wanted, also))
    assert replies.check_server_limits(565, wanted, answer, also) is None


@given(limits, limits, devices)
def test_any_other_limits_are_noticed(wanted: Limits, other: Limits, also: frozenset[int]) -> None:
    """If the daemon has anything else than what was wanted, it is said: no wrong limit is ever confirmed."""
    both = also | set(wanted.memory) | set(other.memory)
    answer = daemon(replies.set_defaults(other, both))
    same = replies.set_defaults(wanted, both) == replies.set_defaults(other, both)
    assert (replies.check_defaults(wanted, answer, both) is None) == same


@given(limits, devices, st.data())
def test_an_answer_that_is_cut_short_is_no_confirmation(
    wanted: Limits, also: frozenset[int], data: st.DataObject
) -> None:
    """A daemon killed in the middle of its answer, a full pipe: a shorter answer must not pass."""
    lines = daemon(replies.set_defaults(wanted, also)).splitlines(keepends=True)
    kept = data.draw(st.integers(0, len(lines) - 1))
    assert replies.check_defaults(wanted, "".join(lines[:kept]), also) is not None


@given(limits, st.text())
def test_no_answer_makes_it_raise(wanted: Limits, out: str) -> None:
    """Garbage from a broken front-end is a sentence, not an exception."""
    replies.check_defaults(wanted, out, (0, 1))
    replies.parse_ps(out)
    replies.parse_status(out)
    replies.parse_server_list(out)
    replies.parse_client_list(out)
    replies.parse_terminate(out)
    replies.refusal(out)


def test_the_commands_are_those_of_the_recordings() -> None:
    """Word for word; a memory limit only in the two forms that MPS does not misread."""
    assert replies.set_defaults(Limits(30, {0: 3 * GIB, 1: 1500 * MIB}), (0, 1, 2)) == [
        "set_default_active_thread_percentage 30.0",
        "set_default_device_pinned_mem_limit 0 3G",
        "set_default_device_pinned_mem_limit 1 1500M",
        "set_default_device_pinned_mem_limit 2 0G",
        "get_default_active_thread_percentage",
        "get_default_device_pinned_mem_limit 0",
        "get_default_active_thread_percentage",
        "get_default_device_pinned_mem_limit 1",
        "get_default_active_thread_percentage",
        "get_default_device_pinned_mem_limit 2",
    ]
    assert replies.start_server(65534) == ["start_server -uid 65534"]
    assert replies.shutdown_server(565) == ["shutdown_server 565"]
    assert replies.shutdown_server(565, force=True) == ["shutdown_server 565 -f"]
    assert replies.terminate_client(565, 606) == ["terminate_client 565 606"]
    assert replies.quit_command(5) == ["quit -t 5"]
    assert replies.quit_command() == ["quit"]
    assert replies.server_status(565) == ["get_server_status 565"]


def test_the_difference_is_said_in_words() -> None:
    """For the person on call: what reads how, and what it should be."""
    wanted = Limits(30, {0: GIB})
    assert replies.check_defaults(wanted, "30.0\n30.0\n1M\n") == (
        "the default memory limit of device 0 reads 1M, not 1G"
    )
    assert replies.check_defaults(wanted, "50.0\n50.0\n1G\n") == (
        "the default active thread percentage reads 50.0, not 30.0"
    )
    assert replies.check_defaults(wanted, "30.0\n30.0\n") == "the default memory limit of device 0 reads none, not 1G"
    assert replies.check_defaults(Limits(30), "30.0\n30.0\n2G\n", (0,)) == (
        "the default memory limit of device 0 reads 2G, not none"
    )
    assert replies.check_defaults(wanted, "30.0\n30.0\n1024M\n") is None, "bytes count, not spelling"
    assert "Insufficient privileges" in (replies.check_defaults(wanted, INSUFFICIENT) or "")


INSUFFICIENT = (
    "Insufficient privileges for UID 1001. Control deamon settings can only be modified by the user who started it or "
    "by the root user.\n"
)


@pytest.mark.parametrize(
    ("out", "kind", "server"),
    [
        ("Server 99999 not found\n", RefusalKind.NO_SUCH_SERVER, 99999),
        ("Server 99999 not found\nServer 99999 not found!\n1\n", RefusalKind.NO_SUCH_SERVER, 99999),
        ("Server not found\n", RefusalKind.NO_SERVER, None),
        ('100.0\nUnknown command "foo"\n', RefusalKind.UNKNOWN_COMMAND, None),
        ('Unknown command ""\n', RefusalKind.UNKNOWN_COMMAND, None),
        (INSUFFICIENT, RefusalKind.NOT_PRIVILEGED, None),
        ("Not enough privilege to execute quit command\n", RefusalKind.NOT_PRIVILEGED, None),
        ("A user id (UID) is required to start a new server\n", RefusalKind.UID_MISSING, None),
    ],
)
def test_every_refusal_of_the_recordings_is_recognised(out: str, kind: RefusalKind, server: int | None) -> None:
    """The exit status is 0 in each of these cases."""
    found = replies.refusal(out)
    assert found is not None
    assert (found.kind, found.server) == (kind, server)


@pytest.mark.parametrize("out", ["", "565\n", "ACTIVE\n", "100.0\n10G\n", "0\n"])
def test_answers_are_no_refusals(out: str) -> None:
    assert replies.refusal(out) is None


def test_lists_and_states_are_read() -> None:
    """As recorded, empty ones included."""
    assert replies.parse_server_list("565\n") == (565,)
    assert replies.parse_server_list("") == ()
    assert replies.parse_client_list("763\n778\n") == (763, 778)
    assert replies.parse_client_list("Server 565 not found\n") == ()
    assert replies.parse_status("FAULT\n") == "FAULT"
    assert replies.parse_status("Server 99999 not found\n") is None
    assert replies.parse_status("") is None


def test_termination_is_known_by_its_last_line() -> None:
    """``0`` is success; ``1``, a refusal and silence are not."""
    assert replies.parse_terminate("0\n") is None
    assert replies.parse_terminate("1\n") == Refusal(RefusalKind.NOT_TERMINATED, "1")
    assert replies.parse_terminate("") == Refusal(RefusalKind.NOT_TERMINATED, "no answer")
    found = replies.parse_terminate("Server 99999 not found\nServer 99999 not found!\n1\n")
    assert found is not None
    assert found.kind is RefusalKind.NO_SUCH_SERVER


def test_the_table_of_clients_is_read() -> None:
    """With the padding of the recordings; a command with blanks stays whole."""
    heading = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        \n"
    out = heading + (
        "1309      1         1311           GPU-d5690a1b-66dd-1b8f    4026531836     /tmp/client    \n"
        "1320      2         1311           GPU-d5690a1b-66dd-1b8f    4026531836     python3 my job.py    \n"
    )
    assert replies.parse_ps(out) == (
        ClientRow(1309, 1, 1311, "GPU-d5690a1b-66dd-1b8f", 4026531836, "/tmp/client"),
        ClientRow(1320, 2, 1311, "GPU-d5690a1b-66dd-1b8f", 4026531836, "python3 my job.py"),
    )
    assert replies.parse_ps("Server not found\n") == ()
    assert replies.parse_ps("") == ()


def test_only_a_batch_that_was_heard_ends_with_the_proof() -> None:
    """A front-end that was turned away may end well and print nothing (scenario X27)."""
    assert replies.proven("") is None
    assert replies.proven("\n") is None
    assert replies.proven("100.0\n") == ""
    assert replies.proven("4242\n12.8\n") == "4242\n"
    assert replies.proven("Server 7 not found\n50.0\n") == "Server 7 not found\n"
    assert replies.proven("Server 7 not found\n") is None
    assert replies.proven("\0\x07garbage 50.0") is None
