"""Messages, channel, assembly, and the loop's process as callers without HTTP meet it."""

from __future__ import annotations

import codecs
import os
import signal
import stat
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.config import EngineConfig
from drivetrain.errors import DrivetrainError, ModelError
from drivetrain.params import (
    Finished,
    GenerateRequest,
    PoolingParams,
    SamplingParams,
    Started,
    StepOutputs,
    TokenLogprobs,
)
from drivetrain.select.choose import Choice
from drivetrain.server import messages
from drivetrain.server.assembly import TextAssembly
from drivetrain.server.channel import ChannelError, Meeting, connect
from drivetrain.server.remote_loop import RemoteLoop
from drivetrain.tokens.stops import StopStrings
from drivetrain_api.v1.hooks import BackendInfo, DeviceRecord, OptionSpec
from tests.unit.server.fakes import ByteDetokenizer, spec


def request(request_id: int, prompt: str | bytes = "x", **options) -> GenerateRequest:
    data = prompt.encode() if isinstance(prompt, str) else prompt
    options = {"max_tokens": 8, "seed": 1, "eos_ids": (256,), "sampling": SamplingParams(temperature=0.0)} | options
    return GenerateRequest(request_id=request_id, prompt_ids=np.frombuffer(data, np.uint8).astype(np.int32), **options)


def sent(message):
    """A message as the other side reads it."""
    kind = messages.Message
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def same(left, right) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    return left == right


def test_a_request_crosses_unchanged():
    original = request(
        2**40,
        seed=2**64 - 1,
        sampling=SamplingParams(temperature=0.5, top_k=3, top_p=0.9, seed=-5, logprobs=2, stop_token_ids=(7,)),
        arrival=1.5,
        priority=-2,
        sample_index=3,
        fanout=9,
        cache_salt="é",
        pooling=PoolingParams(kind="mean"),
        embeds=np.arange(6, dtype=np.float32).reshape(1, 6),
        positions=np.arange(3, dtype=np.int32).reshape(3, 1),
        grammar="g",
    )
    back = messages.request_of(sent(messages.submit_of(original)))
    for name in GenerateRequest.__dataclass_fields__:
        assert same(getattr(original, name), getattr(back, name)), name


def test_outputs_cross_unchanged():
    report = TokenLogprobs(token=4, logprob=float("-inf"), rank=2, top_ids=(1, 2), top_logprobs=(-0.5, -1.5))
    original = StepOutputs(
        request_ids=np.array([5, 2**40]),
        counts=np.array([2, 1], np.int32),
        tokens=np.array([1, 2, 3], np.int32),
        started=(Started(request_id=5, num_cached=16),),
        finished=(
            Finished(request_id=5, reason="stop", stop_token=7),
            Finished(request_id=6, reason="error", error="x", pooled=np.ones(3, np.float32)),
        ),
        logprobs=((5, report),),
    )
    back = messages.unpack_outputs(sent(messages.pack_outputs(original)))
    for name in ("request_ids", "counts", "tokens", "started", "logprobs"):
        assert same(getattr(original, name), getattr(back, name)), name
    for one, other in zip(original.finished, back.finished, strict=True):
        for name in Finished.__dataclass_fields__:
            assert same(getattr(one, name), getattr(other, name)), name


def test_a_configuration_and_a_choice_cross_unchanged():
    choice = Choice(
        name="acme",
        wheel="drivetrain-acme",
        version="1.0",
        info=BackendInfo(
            name="acme",
            vendor="Acme",
            wheel="drivetrain-acme",
            api=">=0.1",
            torch_device_type="cpu",
            options=(OptionSpec(key="k", kind="int", help="h", default=3),),
        ),
        devices=(0, 1),
        records=(DeviceRecord(index=0, name="one", memory_bytes=2**36),),
        options={"k": 3, "flag": True, "text": "x", "none": None, "part": 0.5},
    )
    config = EngineConfig(model="m", num_threads=2, backend_options={"k": "3"})
    launch = messages.Launch(protocol=1, factory="a:b", config=config, choice=choice, beat_seconds=1.0)
    back = sent(launch)
    assert (back.config, back.choice) == (config, choice)
    assert type(back.choice.options["flag"]) is bool


def test_the_channel_is_private_and_takes_messages_only():
    meeting = Meeting()
    assert stat.S_IMODE(os.stat(meeting.directory).st_mode) == 0o700
    front = meeting.bind()
    front.send(messages.Abort((9,)))  # nobody is there: dropped, not an error
    loop = connect(meeting.url)
    loop.send(messages.Hello(3, 4))
    assert front.receive(5.0) == messages.Hello(3, 4)
    front.send(messages.Abort((1, 2)))
    assert loop.receive(5.0) == messages.Abort((1, 2))
    assert loop.receive(0.0) is None
    for bad in (b"", b"\x80\x04K\x01.", msgspec.msgpack.encode({"type": "Nonsense"}), b"\xc1"):
        front._socket.send(bad)
        with pytest.raises(ChannelError, match="can't be read"):
            loop.receive(5.0)
    loop.send(messages.Hello(1, 2))
    assert front.receive(5.0) == messages.Hello(1, 2)
    loop.send(messages.Hello(1, 2))
    with pytest.raises(ChannelError):  # a message of the other direction
        front.send(messages.Hello(1, 2)) or loop.receive(5.0)
    loop.close()
    deadline = time.monotonic() + 5
    while front._socket.poll(0, zmq.POLLOUT) and time.monotonic() < deadline:
        time.sleep(0.01)
    front.send(messages.Abort((1,)))  # the other end is gone: as above
    front.close()
    meeting.remove()
    assert not meeting.directory.exists()


def test_arrays_whose_bytes_and_shape_disagree_are_refused():
    with pytest.raises(ValueError, match="reshape"):
        messages.Array("int32", (3,), b"1234").numpy()
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(("object", (1,), b"12345678")), type=messages.Array)


text = st.text(alphabet="abé🦊 ", max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    data=st.binary(max_size=6) | text.map(str.encode),
    cuts=st.lists(st.integers(1, 4), max_size=20),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
    logprobs=st.booleans(),
)
def test_text_assembled_in_pieces_is_the_text_up_to_the_stop(data, cuts, stops, include, logprobs):
    matcher = StopStrings(stops, include=include) if stops else None
    assembly = TextAssembly(3, ByteDetokenizer(), matcher, logprobs=logprobs)
    tokens, deltas, at = list(data), [], 0
    for cut in [*cuts, len(tokens)]:
        piece = tokens[at : at + cut]
        at += cut
        reports = [TokenLogprobs(token=one, logprob=-1.0, rank=1) for one in piece] if logprobs else []
        if piece and not assembly.finished and (delta := assembly.take(piece, reports)):
            deltas.append(delta)
    if not assembly.finished:
        deltas.append(assembly.finish("length"))
    whole = codecs.decode(data, "utf-8", "replace")
    matches = [(whole.find(one) + len(one), whole.find(one)) for one in stops if one in whole]
    expected = whole if not matches else whole[: min(matches)[0] if include else min(matches)[1]]
    assert "".join(one.text for one in deltas) == expected
    assert [one.finish for one in deltas] == [None] * (len(deltas) - 1) + ["stop" if matches else "length"]
    if logprobs:
        told = [report.token for one in deltas for _, report in one.logprobs]
        assert told == tokens[: len(told)]
        assert matches or told == tokens
        # every report comes with, or before, the end of its token's text, and not before the text's beginning
        sent_so_far = 0
        for one in deltas:
            sent_so_far += len(one.text)
            assert all(begin <= sent_so_far for begin, _ in one.logprobs)


def finish_all(loop: RemoteLoop) -> tuple[dict[int, bytes], dict[int, Finished]]:
    texts: dict[int, bytes] = {}
    ends: dict[int, Finished] = {}
    while loop.has_work():
        for outputs in loop.step():
            tokens = iter(outputs.tokens.tolist())
            for one, count in zip(outputs.request_ids.tolist(), outputs.counts.tolist(), strict=True):
                texts[one] = texts.get(one, b"") + bytes(next(tokens) for _ in range(count))
            ends |= {one.request_id: one for one in outputs.finished}
    return texts, ends


def test_a_loop_in_another_process_has_the_interface_of_a_loop():
    loop = RemoteLoop(spec())
    try:
        assert (loop.max_model_len, loop.vocabulary, loop.dtype) == (4096, 300, "float32")
        assert loop.step() == () and not loop.has_work()
        for one, prompt in enumerate(("SAY first", "letters", "REFUSE", "BADSUBMIT", "endless", "ERROR"), 1):
            loop.submit(request(one, prompt, max_tokens=4000 if prompt == "endless" else 8))
        loop.abort(5)
        loop.abort(99)
        texts, ends = finish_all(loop)
        assert texts[1] == b"first" and len(texts[2]) == 8
        assert [ends[one].reason for one in range(1, 7)] == ["stop", "length", "error", "error", "abort", "error"]
        assert "refused by the loop" in ends[3].error and "a bug in submit" in ends[4].error
        while loop.stats().steps == 0:
            pass
        assert (loop.stats().waiting, loop.stats().running) == (0, 0)
    finally:
        loop.close()
    assert loop.pid is None


@pytest.mark.parametrize(("prompt", "why"), [("CRASH", "SIGKILL"), ("RAISE", "the step broke"), ("HANG", "silent")])
def test_what_a_lost_loop_held_ends_and_the_next_request_starts_another(prompt, why):
    loop = RemoteLoop(spec(step_seconds="0.005"), hang_seconds=1.0)
    try:
        first = loop.pid
        loop.submit(request(1, "endless", max_tokens=4000))
        loop.step()
        loop.submit(request(2, prompt))
        _, ends = finish_all(loop)
        assert {one: (end.reason, why in end.error) for one, end in ends.items()} == {
            1: ("error", True),
            2: ("error", True),
        }
        loop.submit(request(3, "SAY ok"))
        assert finish_all(loop)[0] == {3: b"ok"}
        assert loop.pid != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
    finally:
        loop.close()


def test_the_reason_why_a_loop_cannot_be_built_crosses():
    with pytest.raises(ModelError) as raised:
        RemoteLoop(spec(fail="model"))
    assert (raised.value.message, raised.value.fix) == ("the model is no model", "name another")
    with pytest.raises(DrivetrainError, match="ended with status 7 before it was ready"):
        RemoteLoop(spec(fail="exit"))


def test_the_loop_ends_when_its_parent_is_gone(tmp_path):
    code = """
import sys, time
from drivetrain.server.remote_loop import RemoteLoop
from tests.unit.server.fakes import spec
print(RemoteLoop(spec()).pid, flush=True)
time.sleep(60)
"""
    from tests.unit.server.fakes import ROOT

    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = 200
    while deadline and _alive(child):
        signal.sigtimedwait((), 0.05)
        deadline -= 1
    assert not _alive(child)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent's attention does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
