"""The outside of the provider `local`: opening a sandbox, asking it, and its end."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift_r1.sandboxes.base import (
    ExecResult,
    SandboxError,
    SandboxOver,
    SandboxSpec,
    StatefulSandbox,
    proxy_address,
)
from swift_r1.sandboxes.local import frames, rootfs, supervisor
from swift_r1.sandboxes.local.relay import VARIABLES, Relay
from swift_r1.workers.sandbox import kernel
from swift_r1.workers.sandbox.start import START_SECONDS, InnerPython, refused

_logger = logging.getLogger("swift_r1.sandboxes")
_GRACE_SECONDS = 30.0  # for an answer, after a command's own time
_WRITE_SECONDS = 60.0
_AGAIN_SECONDS = 1.0  # where the machine's programs are just being replaced
_FIRST_USER = 2_000_000_000  # those above it belong to nobody, and to no container
_USERS = f"0 {_FIRST_USER} 65536\n"  # where this process is root's


class LocalSandbox(StatefulSandbox):
    """A sandbox in namespaces of this machine; it ends with this process.

    Args:
        line: to its supervisor.
    """

    def __init__(self, line: socket.socket, spec: SandboxSpec) -> None:
        self._line = line
        self._spec = spec
        self._alone = threading.Lock()
        ends = ExitStack()
        self._end = weakref.finalize(self, _hang_up, line, ends, os.getpid())
        try:
            for number in _started(line).files:
                relay = Relay(socket.socket(fileno=number), proxy_address(spec.network or ""))
                ends.callback(relay.close)
        except (OSError, SandboxError) as error:
            self.close()
            raise SandboxError(str(error)) from None

    def exec(self, command: str, seconds: float) -> ExecResult:
        asked = {"do": "exec", "seconds": seconds}
        answer = self._ask(asked, seconds, command.encode("utf-8", "replace"))
        header = answer.header
        output = header["notes"] + answer.body.decode(errors="replace")
        return ExecResult(header["code"], output, header["truncated"])

    def write_file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        asked = {"do": "write", "path": path, "mode": mode, "seconds": _WRITE_SECONDS}
        answer = self._ask(asked, _WRITE_SECONDS, content)
        if answer.header["code"] != 0:
            why = answer.body.decode(errors="replace").strip()
            raise SandboxError(f"{path} cannot be written in the sandbox: {why or 'out of time'}")

    def close(self) -> None:
        self._end()

    def _ask(
        self,
        header: dict[str, Any],
        seconds: float,
        body: bytes = b"",
    ) -> frames.Frame:
        with self._alone:
            if not self._end.alive:
                raise SandboxOver("the sandbox is over: it is closed")
            try:
                frames.send(self._line, header, body)
                return _answer(self._line, seconds + _GRACE_SECONDS)
            except SandboxError:
                raise
            except OSError as error:
                self.close()
                raise SandboxError(f"the sandbox broke: {error}") from None
            except BaseException:  # interrupted: the next one would get this answer
                self.close()
                raise


def open_local(spec: SandboxSpec) -> LocalSandbox:
    """Opens a sandbox. Raises SandboxError: this machine does not allow it, or its image is none."""
    proxied = VARIABLES if spec.network is not None else {}
    home = _machine().rootfs(spec.image)
    asked = {
        **asdict(spec.limits),
        "proxy": spec.network is not None,
        "workdir": spec.workdir,
        "env": {**proxied, **spec.env},
    }
    mine, theirs = socket.socketpair()
    try:
        with theirs:
            frames.send(home, asked, files=[theirs.fileno()])
    except OSError as error:
        mine.close()
        raise SandboxError(f"the sandboxes broke: {error}") from None
    return LocalSandbox(mine, spec)


def image_folder(name: str) -> str:
    """Returns the folder with the root of an image, HOST as it is. Raises SandboxError: there is none."""
    if name != rootfs.HOST and not Path(name).is_dir():
        raise SandboxError(
            f"the image {name} is neither {rootfs.HOST!r} nor a folder with a root in it"
        )
    return name if name == rootfs.HOST else str(Path(name).resolve())


class _Machine:
    """The first process inside, and its rootfs."""

    def __init__(self) -> None:
        self._inner = InnerPython(supervisor.__name__)
        self._alone = threading.Lock()
        self._rootfs: dict[str, socket.socket] = {}
        try:
            self._many = self._inner.admit(_USERS if os.geteuid() == 0 else None)
        except (OSError, SandboxError) as error:
            self._inner.close()
            raise refused(str(error)) from None

    @property
    def closed(self) -> bool:
        """Says whether the first process has ended, also in a fork of the process that has started it."""
        poll = select.poll()
        poll.register(
            self._inner.control, select.POLLIN
        )  # it says nothing more, so that is its end
        return bool(poll.poll(0))

    def rootfs(self, name: str) -> socket.socket:
        """Returns the line to an image's rootfs, which is made first. Raises SandboxError, OSError."""
        with self._alone:
            if name not in self._rootfs:
                folder = image_folder(name)
                try:
                    line = self._live_in(folder)
                except SandboxError as error:
                    _logger.warning("%s; once more", error)
                    time.sleep(_AGAIN_SECONDS)
                    line = self._live_in(folder)
                self._rootfs[name] = line
            return self._rootfs[name]

    def _live_in(self, folder: str) -> socket.socket:
        return self._ask({"image": folder}, self._trees(folder), _started)

    def _trees(self, folder: str) -> tuple[int, ...]:
        """Returns a mount of a folder whose owners are users of the sandboxes; none where they are anyway.
        Raises SandboxError: they cannot be."""
        if folder == rootfs.HOST:
            return ()
        if not self._many:
            owner = os.stat(folder).st_uid
            if owner != os.geteuid():
                raise SandboxError(
                    f"{folder} belongs to user {owner}, and only what is yours can be an image"
                )
            return ()
        users = os.open(f"/proc/{self._inner.pid}/ns/user", os.O_RDONLY)
        try:
            return (kernel.clone_tree(folder, users),)
        except OSError as error:
            raise SandboxError(
                f"{folder} cannot be mounted with the users of a sandbox: {error}"
            ) from None
        finally:
            os.close(users)

    def _ask(
        self,
        header: dict[str, Any],
        files: tuple[int, ...],
        answer: Callable[[socket.socket], object],
    ) -> socket.socket:
        """Returns the line to the process that was forked for it, when that has answered; closes `files`."""
        mine, theirs = socket.socketpair()
        try:
            with theirs:
                frames.send(self._inner.control, header, files=[theirs.fileno(), *files])
            answer(mine)
        except BaseException:
            mine.close()
            raise
        finally:
            for number in files:
                os.close(number)
        return mine


_machines: list[_Machine] = []  # none, or one
_one_at_a_time = threading.Lock()


def _machine() -> _Machine:
    """Returns that of this process and of those that are forked from it afterwards: a frame is one message, so several
    may ask. One that was killed has a successor."""
    with _one_at_a_time:
        if not _machines or _machines[0].closed:
            _machines[:] = [_Machine()]
        return _machines[0]


def _started(line: socket.socket) -> frames.Frame:
    """Raises SandboxError: it could not start; OSError."""
    try:
        return _answer(line, START_SECONDS)
    except SandboxError as error:
        raise refused(str(error)) from None


def _answer(line: socket.socket, seconds: float) -> frames.Frame:
    """Raises SandboxOver, SandboxError; OSError: there was no answer in time."""
    line.settimeout(seconds)
    answer = frames.receive(line)
    if answer is None:
        raise SandboxError("the sandbox broke: its supervisor ended")
    if "over" in answer.header:
        raise SandboxOver(f"the sandbox is over: {answer.header['over']}")
    if "error" in answer.header:
        raise SandboxError(answer.header["error"])
    return answer


def _hang_up(line: socket.socket, ends: ExitStack, owner: int) -> None:
    """Ends the sandbox, and waits until its supervisor has; does not in a fork of the process that has opened it."""
    if os.getpid() != owner:
        return
    with ends, line:
        try:
            line.shutdown(socket.SHUT_WR)  # also where a fork of this process still has the line
            line.settimeout(_GRACE_SECONDS)
            while line.recv(1 << 10):
                pass
        except OSError as error:
            _logger.warning("a sandbox may not have ended: %s", error)
