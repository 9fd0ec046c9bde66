"""A plan is held against what the device counts, where a profiler says that, else against the allocator's peak."""

from types import SimpleNamespace

from drivetrain.starting import peak_in_use


def test_the_devices_own_count_comes_first():
    device = SimpleNamespace(memory=lambda: SimpleNamespace(peak=7))
    assert peak_in_use(SimpleNamespace(memory=SimpleNamespace(), device=device)) == 7
    assert peak_in_use(SimpleNamespace(memory=SimpleNamespace(peak_in_use=lambda: 9), device=device)) == 9
