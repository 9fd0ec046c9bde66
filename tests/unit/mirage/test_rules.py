"""Every rule of the device, each with the fault that it has to catch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from drivetrain_api.v1 import CachePart, CacheSpec, ErrorClass
from drivetrain_mirage.device import DeviceOptions, MirageDevice
from drivetrain_mirage.ledger import MirageOutOfMemory
from drivetrain_mirage.rules import RULES, DeviceLost, RuleError
from drivetrain_mirage.runtime import MirageRuntime
from drivetrain_mirage.storage import MirageStorage

KV = CacheSpec(
    kind="full",
    parts=(CachePart(name="k", shape=(2, 4), dtype="float32"), CachePart(name="v", shape=(2, 6), dtype="float32")),
)


def breaks(rule: str):
    """Expect the rule to be named, with a fix."""
    assert rule in RULES
    return pytest.raises(RuleError, match=rf"mirage rule '{rule}'.*Fix: ")


READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "if": lambda x: 1 if (x > 0).all() else 0,
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "index": lambda x: [1, 2][x[0].to(torch.int64)],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to with dtype": lambda x: x.to("cpu", torch.float32),
    "into a host tensor": lambda x: torch.zeros(4).copy_(x),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", READS)
def test_values_do_not_reach_the_host_by_themselves(runtime, name, mode):
    with mode():
        x = runtime.zeros((4,), torch.float32)
        if name == "if":
            with pytest.raises(RuleError):
                READS[name](x)
            return
        with breaks("no-host-reads"):
            READS[name](x)


def test_printing_shows_no_values(runtime):
    x = runtime.from_host(np.full(3, 12345.0, np.float32))
    assert "12345" not in f"{x} {x[0]} {x!r}"


VALUE_SHAPES = {
    "nonzero": lambda x, m: m.nonzero(),
    "where without values": lambda x, m: torch.where(m),
    "masked_select": lambda x, m: x.masked_select(m),
    "boolean index": lambda x, m: x[m],
    "boolean assignment": lambda x, m: x.__setitem__(m, x[:1]),
    "unique": lambda x, m: x.unique(),
    "repeats": lambda x, m: x.repeat_interleave(m.to(torch.int64)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VALUE_SHAPES)
def test_no_shape_depends_on_values(runtime, name, mode):
    with mode():
        x = runtime.zeros((4,), torch.float32)
        mask = x > 0
        with breaks("fixed-shapes"):
            VALUE_SHAPES[name](x, mask)


MIXES = {
    "host second": lambda x: x + torch.ones(4),
    "host first": lambda x: torch.ones(4) + x,
    "inside a list": lambda x: torch.cat([x, torch.ones(4)]),
    "host index": lambda x: x[torch.tensor([0, 1])],
    "host value": lambda x: x.copy_(torch.ones(4)),
    "where": lambda x: torch.where(x > 0, x, torch.ones(4)),
    "shape-only tensor": lambda x: x + torch.ones(4, device="meta"),
    "upload into host memory": None,
}


@pytest.mark.parametrize("name", MIXES)
def test_host_and_device_tensors_do_not_mix(runtime, name):
    x = runtime.zeros((4,), torch.float32)
    with breaks("one-device"):
        if name == "upload into host memory":
            runtime.upload(np.zeros(4, np.float32), torch.zeros(4))
        else:
            MIXES[name](x)


def test_two_devices_do_not_mix(runtime):
    other = MirageRuntime(MirageDevice(DeviceOptions()))
    with breaks("one-device"):
        _ = runtime.zeros((2,), torch.float32) + other.zeros((2,), torch.float32)
    with breaks("one-device"):
        runtime.use(object()).__enter__()
    with breaks("one-device"):
        runtime.stream().wait_event(object())


FACTORIES = {
    "empty": lambda x: torch.empty(3, device="mirage"),
    "zeros": lambda x: torch.zeros(3, device=x.device),
    "arange": lambda x: torch.arange(3, device="mirage:0"),
    "full": lambda x: torch.full((3,), 1.0, device=x.device),
    "tensor": lambda x: torch.tensor([1.0], device="mirage"),
    "to": lambda x: torch.ones(3).to(x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_only_the_runtime_allocates(runtime, name):
    x = runtime.zeros((3,), torch.float32)
    with breaks("runtime-allocates"):
        FACTORIES[name](x)


DTYPES = {
    "half by conversion": lambda r, x: x.to(torch.float16),
    "half by the runtime": lambda r, x: r.zeros((2,), torch.float16),
    "int16": lambda r, x: x.to(torch.int16),
    "double by the runtime": lambda r, x: r.empty((2,), torch.float64),
    "double from the host": lambda r, x: r.from_host(np.zeros(2)),
    "double in a product": lambda r, x: x.to(torch.float64).view(2, 2) @ x.to(torch.float64).view(2, 2),
    "double by default": lambda r, x: x.double().sort(),
    "complex": lambda r, x: x.to(torch.complex64),
    "view": lambda r, x: x.view(torch.int16),
    "bfloat16 to numpy": lambda r, x: r.to_host([x.to(torch.bfloat16)]),
}


@pytest.mark.parametrize("name", DTYPES)
def test_undeclared_dtypes_are_refused(runtime, name):
    x = runtime.zeros((4,), torch.float32)
    with breaks("declared-dtypes"):
        DTYPES[name](runtime, x)


UNDECLARED = {
    "fused attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "random numbers": lambda x: torch.rand_like(x),
    "inverse": lambda x: torch.linalg.inv(x),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)),
    "out of place": lambda x: torch.add(x, 1, out=x),
    "svd": lambda x: torch.linalg.svd(x),
}


@pytest.mark.parametrize("name", UNDECLARED)
def test_undeclared_ops_are_refused(runtime, name):
    x = runtime.zeros((4, 4), torch.float32)
    with breaks("declared-ops"):
        UNDECLARED[name](x)


def test_slots_and_block_ids_are_int32(runtime):
    storage = MirageStorage(runtime.owner)
    cache = storage.allocate(storage.layout(KV, 128), 3)
    wide = runtime.zeros((2,), torch.int64)
    values = tuple(runtime.zeros((2, *p.shape), torch.float32) for p in KV.parts)
    assert storage.layout(KV, 128).slot_dtype == "int32"
    for use in (
        lambda: cache.read(wide),
        lambda: cache.write(wide, values),
        lambda: cache.zero_blocks(wide),
        lambda: cache.copy_blocks(wide, wide),
        lambda: cache.export_blocks(wide),
        lambda: cache.freed(wide),
    ):
        with breaks("int32-slots"):
            use()


@pytest.mark.parametrize("size", [16, 32, 64, 256])
def test_blocks_hold_128_tokens(runtime, size):
    storage = MirageStorage(runtime.owner)
    assert storage.block_tokens == (128,)
    with breaks("block-size"):
        storage.layout(KV, size)


def test_there_is_no_pool(runtime):
    storage = MirageStorage(runtime.owner)
    layout = storage.layout(KV, 128)
    assert not layout.strided
    with breaks("no-pool"):
        storage.allocate_pool(1 << 20)
    with breaks("no-pool"):
        storage.view(object(), layout, 4096, 0)


def test_a_float16_cache_is_refused(runtime):
    spec = CacheSpec(kind="full", parts=(CachePart(name="k", shape=(2, 4), dtype="float16"),))
    with breaks("declared-dtypes"):
        MirageStorage(runtime.owner).layout(spec, 128)


# -- a ring of host buffers ----------------------------------------------------------------------------------


def test_a_host_buffer_reused_too_early_is_caught(runtime, stall):
    source, target = runtime.host_buffer((4,), "int32"), runtime.zeros((4,), torch.int32)
    stall(0.1)
    runtime.upload(source, target)
    event = runtime.stream().record()
    source[:] = 7  # the event is not done
    assert not event.done()
    with breaks("stable-upload"):
        event.wait()


def test_so_is_one_reused_between_upload_and_event(runtime):
    source, target = runtime.host_buffer((4,), "int32"), runtime.zeros((4,), torch.int32)
    runtime.upload(source, target)
    runtime.owner.current.flush()
    while not (target.raw == 0).all():  # wait until the queue has read the buffer
        pass
    source[:] = 7
    event = runtime.stream().record()
    with breaks("stable-upload"):
        event.wait()


def test_a_ring_that_waits_for_its_events_is_fine(runtime, stall):
    ring = [runtime.host_buffer((4,), "int32") for _ in range(2)]
    target, events, seen = runtime.zeros((4,), torch.int32), [None, None], []
    for step in range(6):
        if events[step % 2] is not None:
            events[step % 2].wait()
        ring[step % 2][:] = step
        stall(0.005)
        runtime.upload(ring[step % 2], target)
        events[step % 2] = runtime.stream().record()
        seen.append(runtime.to_host([target * 1]))
    assert [copy.get()[0][0] for copy in seen] == list(range(6))


def test_an_upload_is_read_late(runtime, stall):
    """What the device gets is what the buffer holds when the queue comes to it: the fault shows in the values too."""
    source, target = np.zeros(4, np.int32), runtime.zeros((4,), torch.int32)
    stall(0.1)
    runtime.upload(source, target)
    source[:] = 7
    with breaks("stable-upload"):
        runtime.synchronize()


def test_upload_checks_shape_and_dtype(runtime):
    target = runtime.zeros((4,), torch.int32)
    with pytest.raises(ValueError, match="must be equal"):
        runtime.upload(np.zeros(3, np.int32), target)
    with pytest.raises(ValueError, match="must be equal"):
        runtime.upload(np.zeros(4, np.int64), target)


# -- memory and faults ---------------------------------------------------------------------------------------


def test_out_of_memory_is_classified(runtime):
    held = runtime.zeros((40 << 20,), torch.uint8)
    with pytest.raises(MirageOutOfMemory, match=r"out of memory.*Fix") as caught:
        runtime.zeros((40 << 20,), torch.uint8)
    assert runtime.classify_error(caught.value) is ErrorClass.OUT_OF_MEMORY
    assert runtime.memory().allocated == held.numel()
    del held
    assert runtime.memory().allocated == 0
    runtime.zeros((40 << 20,), torch.uint8)


def test_a_lost_device_refuses_work(runtime):
    x = runtime.zeros((2,), torch.float32)
    runtime.owner.lose("fell off the bus")
    assert not runtime.health().ok
    for work in (lambda: x + 1, lambda: x.add_(1), lambda: runtime.to_host([x]), lambda: runtime.zeros((1,), x.dtype)):
        with pytest.raises(DeviceLost, match="fell off the bus") as caught:
            work()
        assert runtime.classify_error(caught.value) is ErrorClass.DEVICE_LOST


def test_an_error_of_queued_work_is_raised_once_where_the_host_waits(runtime):
    table = runtime.from_host(np.arange(4, dtype=np.float32))
    wrong, right = (runtime.from_host(np.array([i], np.int32)) for i in (9, 2))
    lost = runtime.to_host([table[wrong]])
    good = runtime.to_host([table[right]])
    with pytest.raises(IndexError):
        lost.get()
    assert good.get()[0].tolist() == [2.0]
    runtime.synchronize()


def test_hooks_before_create_need_no_torch():
    code = (
        "import sys; from drivetrain_mirage.plugin import plugin, static_plugin as s;"
        "from drivetrain_api.v1 import ConfigView;"
        "print([(p.backend_info().name, len(p.probe()), p.environment((0,), ConfigView())) for p in (plugin, s)]);"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "('mirage', 1, {})" in done.stdout and "('mirage-static', 1, {})" in done.stdout
