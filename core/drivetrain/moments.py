"""Moments of a step that somebody may want to know: the borders between the parts of a first token's time.

Whoever traces gives ``watch`` a listener; without one a moment costs a comparison. All come from the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Moment = Literal[
    "received",  # a request has arrived at the loop's process
    "admitted",  # it is queued
    "looked up",  # its prompt is hashed and looked up in the cache
    "planned",  # a step has its plan
    "laid out",  # the step's arrays are made
    "uploaded",  # their copy to the device is queued
    "changed",  # so are the changes of the rows
    "forward queued",
    "draws queued",
    "copy queued",  # nothing more is to be submitted for the step
    "told",  # the front end knows which requests are accepted
    "waiting",  # for the step's tokens
    "copied",  # they are on the host
    "committed",
    "sent",  # to the front end
]
Listener = Callable[[Moment], None]
_listener: Listener | None = None


def watch(listener: Listener | None) -> None:
    """Let a listener hear of every moment as it passes, or nobody."""
    global _listener
    _listener = listener


def passed(moment: Moment) -> None:
    """Tell the listener, if there is one."""
    if _listener is not None:
        _listener(moment)
