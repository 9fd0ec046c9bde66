"""A pair of sockets in a directory that only this user can enter. One message is one frame of MessagePack."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.server.messages import FromLoop, ToLoop

LONGEST_PATH = 100  # a socket's path must fit a field of 104 to 108 bytes
Out = TypeVar("Out")
In = TypeVar("In")


class ChannelError(DrivetrainError):
    """The other side sent something that is no message."""


class Channel(Generic[Out, In]):
    """One end. Owned by one thread. Sending never blocks: queues are bounded by what requests may produce."""

    def __init__(self, socket: zmq.Socket[bytes], incoming: UnionType) -> None:
        self._socket = socket
        self._patience = -1  # milliseconds that the socket waits for a message, as it was told last
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(incoming)

    def send(self, message: Out) -> None:
        """Queue a message; an input-output thread carries it.

        With nobody at the other end it is dropped: whoever watches that process ends what the message was about.
        """
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self, timeout: float) -> In | None:
        """Return the next message, or None after ``timeout`` seconds. ChannelError when it is no message."""
        patience = int(timeout * 1000)
        if patience > 0 and patience != self._patience:
            self._socket.setsockopt(zmq.RCVTIMEO, patience)
            self._patience = patience
        try:
            frame = self._socket.recv(0 if patience > 0 else zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            message: In = self._decoder.decode(frame)
        except (msgspec.MsgspecError, DrivetrainError) as error:
            raise ChannelError(f"a message between front end and loop can't be read: {error}") from error
        return message

    def pending(self) -> bool:
        """Return whether a message waits. Clears the edge that ``fileno`` signals."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor that turns readable when something changed; then call ``receive`` until None."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self, linger: float = 0.0) -> None:
        """Close; up to ``linger`` seconds are spent on sending what is queued."""
        self._socket.close(int(linger * 1000))


class Meeting:
    """A private directory with one socket. The front end makes and removes it; the loop's process is told its URL."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="drivetrain-"))  # mode 0700
        path = str(self.directory / "loop")
        if len(path.encode()) > LONGEST_PATH:
            self.remove()
            raise ConfigError(f"{path} is too long for a socket", fix="set TMPDIR to a shorter directory")
        self.url = f"ipc://{path}"

    def bind(self) -> Channel[ToLoop, FromLoop]:
        """Open the front end's end."""
        socket = _pair()
        socket.bind(self.url)
        return Channel(socket, FromLoop)

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)


def connect(url: str) -> Channel[FromLoop, ToLoop]:
    """Open the loop's end."""
    socket = _pair()
    socket.connect(url)
    return Channel(socket, ToLoop)


def _pair() -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
