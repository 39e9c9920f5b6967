"""The client's side of the wire, without any process."""

from __future__ import annotations

import socket
import threading

import pytest

from mpsagent_sim.cuda_client import SUCCESS, Cuda


@pytest.fixture
def pair() -> tuple[Cuda, socket.socket]:
    """A client with a context, and the server's end of it."""
    here, there = socket.socketpair(type=socket.SOCK_SEQPACKET)
    cuda = Cuda()
    cuda.context = here
    return cuda, there


def test_work_stands_still_while_a_neighbour_is_terminated(pair: tuple[Cuda, socket.socket]) -> None:
    """03 Q6: 60 iterations in 16 s instead of 240, and no error."""
    cuda, server = pair
    server.sendall(b"HOLD")
    result: list[str] = []
    worker = threading.Thread(target=lambda: result.append(cuda.wait(0.01)))
    worker.start()
    worker.join(0.5)
    assert worker.is_alive()
    server.sendall(b"GO")
    worker.join(60)
    assert result == [SUCCESS]


@pytest.mark.parametrize(
    ("packets", "error"),
    [
        ([b"STICKY"], "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ([b"TERMINATE"], "CUDA_ERROR_MPS_CLIENT_TERMINATED"),
        ([b"HOLD", b"TERMINATE"], "CUDA_ERROR_MPS_CLIENT_TERMINATED"),
        ([], "CUDA_ERROR_MPS_RPC_FAILURE"),
    ],
)
def test_what_a_kernel_ends_with(pair: tuple[Cuda, socket.socket], packets: list[bytes], error: str) -> None:
    """And the first error stays, whatever follows."""
    cuda, server = pair
    for packet in packets:
        server.send(packet)
    if not packets:
        server.close()
    assert cuda.kernel(600) == error
    server.close()
    assert cuda.wait(0.01) == error
    assert cuda.kernel(600) == error


def test_a_terminated_client_answers_once_and_keeps_its_context(pair: tuple[Cuda, socket.socket]) -> None:
    """X8 of the real runs: it counts as connected until it exits, and a second request finds no answer."""
    cuda, server = pair
    server.send(b"TERMINATE")
    server.send(b"TERMINATE")
    cuda.kernel(600)
    assert [server.recv(100), server.recv(100)] == [b"KERNEL", b"TERMINATED"]
    assert cuda.context is not None
