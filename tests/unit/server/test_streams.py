"""What a stream's reader sees: chunks written from a frame, and quiet times."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.server.assembly import Delta
from drivetrain.server.frontend import Reply
from drivetrain.server.replies import ChatForm, CompletionForm, Wanted

NAME = 'a "model" \0'


def forms(**wanted) -> list:
    told = Wanted(**wanted)
    return [
        ChatForm(NAME, bytes, told),
        CompletionForm(NAME, bytes, told, echoes=["", ""], n=2),
    ]


@given(st.text(min_size=1), st.integers(0, 3), st.booleans())
def test_framed_chunks_are_those_that_are_written_whole(text: str, index: int, usage: bool) -> None:
    delta = Delta(index=index, text=text)
    chat, completion = forms(usage=usage)
    for _ in range(2):
        assert chat.chunk(delta) == chat._chunk(index, {"content": text}, delta)
        assert completion.chunk(delta) == completion._chunk(index, text, delta)
    content = json.loads(chat.chunk(delta))
    assert content["model"] == NAME and content["choices"][0]["delta"]["content"] == text
    assert ("usage" in content) == usage


def test_chunks_that_hold_more_than_text_are_written_whole() -> None:
    for form in forms(token_ids=True):
        assert json.loads(form.chunk(Delta(index=0, text="a", tokens=(7,))))["choices"][0]["token_ids"] == [7]
    for form in forms():
        form.chunk(Delta(index=0, text="a"))
        assert json.loads(form.chunk(Delta(index=0, text="b", finish="stop")))["choices"][0]["finish_reason"] == "stop"


def test_a_reader_is_woken_by_quiet_and_by_deltas() -> None:
    async def read() -> list[float]:
        reply, waits = Reply(1, 3, 0.0), []
        loop = asyncio.get_running_loop()
        for delay in (0.05, None, 0.05, None):
            if delay is not None:
                loop.call_later(delay, reply.push, Delta(index=0, text="a"))
            begin = time.monotonic()
            deltas = await reply.next(0.2)
            assert len(deltas) == (delay is not None)
            waits.append(time.monotonic() - begin)
        reply.push(Delta(index=0, finish="stop"))
        assert [delta.finish for delta in await reply.next(0.2)] == ["stop"] and reply.done
        assert await reply.next(0.2) == []
        reply.abandon()
        assert reply._timer is None, "nothing keeps it alive"
        return waits

    waits = asyncio.run(read())
    assert waits[0] < 0.2 and waits[2] < 0.2
    assert waits[1] == pytest.approx(0.2, abs=0.15) and waits[1] > 0.19, "counted from when it began to wait"
    assert waits[3] > 0.19


def test_a_reader_without_a_limit_waits_without_a_timer() -> None:
    async def read() -> None:
        reply = Reply(1, 3, 0.0)
        asyncio.get_running_loop().call_later(0.02, reply.push, Delta(index=0, text="a"))
        assert len(await reply.next()) == 1 and reply._timer is None

    asyncio.run(read())
