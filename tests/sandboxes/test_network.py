"""What a sandbox reaches of a network: nothing, or one proxy."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from swift_r1.sandboxes.local import relay
from swift_r1.sandboxes.local.sandbox import LocalSandbox
from tests.conftest import until

Open = Callable[..., LocalSandbox]
ASK = """python3 - <<'END'
import socket
with socket.create_connection(("127.0.0.1", {port}), 5) as line:
    line.sendall(b"asked" * {size})
    line.shutdown(socket.SHUT_WR)
    print(len(line.makefile("rb").read()))
END"""


MANY = """python3 - <<'END'
import collections, socket
said = collections.Counter()
held = []
for number in range({count}):
    line = socket.create_connection(("127.0.0.1", 3128), 20)
    line.sendall(b"CONNECT a:1 HTTP/1.1\\r\\n\\r\\n")
    line.settimeout(0.05 if number < {held} else 20)
    try:
        said[line.recv(100).split(b"\\r")[0].decode()] += 1
    except TimeoutError:
        held.append(line)
print(len(held), *said.items())
END"""


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets, once all of it is there."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as threads:

        def answer(line: socket.socket) -> None:
            with line:
                line.sendall(line.makefile("rb").read())

        def serve() -> None:
            while True:
                try:
                    line, _ = server.accept()
                except OSError:
                    return
                thread = threading.Thread(target=answer, args=(line,))
                thread.start()
                threads.callback(thread.join, 5)

        accepting = threading.Thread(target=serve)
        accepting.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        accepting.join(5)


def test_without_a_proxy_there_is_a_loopback_alone(opened: Open, echo: int) -> None:
    box = opened()
    refused = box.exec(ASK.format(port=echo, size=1), 20)
    assert refused.exit_code == 1 and "ConnectionRefusedError" in refused.output
    assert box.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '", 20).output == "lo\n"
    own = "s.create_server(('127.0.0.1', 80)), s.create_connection(('127.0.0.1', 80))"
    assert box.exec(f'python3 -c "import socket as s; print(len([{own}]))"', 20).output == "2\n"


def test_a_proxy_is_all_that_is_in_reach(opened: Open, echo: int) -> None:
    box = opened(network=f"127.0.0.1:{echo}")
    assert box.exec("echo $https_proxy", 20).output == "http://127.0.0.1:3128\n"
    assert box.exec(ASK.format(port=3128, size=1 << 20), 20).output == f"{5 << 20}\n"
    assert "refused" in box.exec(ASK.format(port=echo, size=1), 20).output
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    nobody = opened(network=f"127.0.0.1:{port}")
    answer = nobody.exec(ASK.format(port=3128, size=1), 20).output
    assert (
        answer == "0\n" or "OSError" in answer
    )  # as the end is seen before or after what was sent
    with pytest.raises(ValueError, match="HOST:PORT of a proxy, got 'proxy'"):
        opened(network="proxy")


def test_connections_are_bounded_and_the_others_are_answered(
    opened: Open, echo: int, caplog: pytest.LogCaptureFixture
) -> None:
    box = opened(network=f"127.0.0.1:{echo}")
    before = len(os.listdir("/proc/self/fd"))
    most = relay._MOST_CONNECTIONS
    said = box.exec(MANY.format(count=most + 20, held=most), 60).output
    assert said == f"{most} ('HTTP/1.1 503 Service Unavailable', 20)\n"
    assert len([one for one in caplog.records if "are refused: it has" in one.message]) == 1
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert box.exec(ASK.format(port=3128, size=1), 20).output == "5\n"


def test_all_sandboxes_together_leave_files_to_this_process(
    opened: Open, echo: int, caplog: pytest.LogCaptureFixture
) -> None:
    boxes = [opened(network=f"127.0.0.1:{echo}") for _ in range(2)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * (now + 40), hard))
    try:
        for box in boxes:
            said = box.exec(MANY.format(count=24, held=24), 60).output
        assert "503" in said
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "half of the trainer's" in caplog.text
