"""Hooks, threads, options and what is declined."""

import subprocess
import sys

import pytest
import torch

from drivetrain.ops import Ops
from drivetrain_api.v1 import ConfigView, Decline, DeviceRecord, LinearSpec, PlanSummary, RmsNormSpec
from drivetrain_cpu import threads
from drivetrain_cpu.plugin import plugin


@pytest.fixture
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def create(**fields):
    return plugin.create((0,), ConfigView(**fields))


def test_hooks_load_no_torch():
    code = (
        "import sys; from drivetrain_cpu.plugin import plugin; from drivetrain_api.v1 import ConfigView;"
        "plugin.backend_info(); plugin.environment((0,), ConfigView()); plugin.probe();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_host_is_probed():
    (record,) = plugin.probe()
    assert isinstance(record, DeviceRecord)
    assert record.index == 0 and record.name and record.architecture and record.memory_bytes > 1 << 28


def test_waiting_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert plugin.environment((0,), ConfigView())["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "OMP_WAIT_POLICY" not in plugin.environment((0,), ConfigView())


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [({"num_threads": 2}, 2), ({"options": {"num_threads": 3}}, 3), ({"options": {"num_threads": 0}}, None)],
)
def test_threads_are_set(keep_threads, fields, wanted):
    create(**fields)
    assert torch.get_num_threads() == (wanted or threads.usable_cores())


def test_quota_of_the_control_group_is_read(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert threads.quota_cores(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert threads.quota_cores(tmp_path) is None
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert threads.quota_cores(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("400000\n")
    assert threads.quota_cores(tmp_path) == 4.0


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.5, 1), (2.0, 2), (None, 5), (64.0, 5)])
def test_cores_are_the_lesser_of_affinity_and_quota(monkeypatch, quota, cores):
    monkeypatch.setattr(threads, "quota_cores", lambda: quota)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(5)), raising=False)
    assert threads.usable_cores() == cores


def test_unknown_dtypes_are_declined_with_the_reason(keep_threads):
    backend = create()
    answer = backend.provide(RmsNormSpec(dtype="float16", size=4, eps=1e-6))
    assert isinstance(answer, Decline) and "float16" in answer.reason


def test_an_impossible_kernel_is_declined_and_named(keep_threads):
    backend = create(options={"linear": "half"})
    answer = backend.provide(LinearSpec(dtype="float32", in_features=4, out_features=4))
    assert isinstance(answer, Decline) and "half" in answer.reason and "float32" in answer.reason


def test_labels_say_which_kernel_and_why_not_a_better_one(keep_threads, monkeypatch):
    from drivetrain_cpu import linear

    monkeypatch.setitem(linear.CHECKS, "onednn", lambda dtype: "not on this machine")
    ops = Ops(create(), block_tokens=16, strict=True)
    ops.bind(LinearSpec(dtype="float32", in_features=4, out_features=4))
    why = "onednn: not on this machine; native: no kernel for float32 weights; half: would round float32 weights"
    assert ops.report[0].label == f"native: torch linear ({why})"


def plan_of(dtype="float32", tensor_parallel=1):
    return PlanSummary(
        model_type="llama",
        dtype=dtype,
        cache_dtype="float32",
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=64,
        block_tokens=16,
        deterministic=False,
        tensor_parallel=tensor_parallel,
    )


@pytest.mark.parametrize("asked", [-5, 1025, 100000, 10**20])
def test_a_number_of_threads_that_can_t_be_is_a_problem_not_a_crash(keep_threads, asked):
    (problem,) = create(options={"num_threads": asked}).validate(plan_of())
    assert problem.setting == "backend-option" and f"num_threads={asked}" in problem.reason
    assert not create(options={"num_threads": 0}).validate(plan_of())


def test_problems_are_named_with_a_proposal(keep_threads):
    plan = plan_of("float64", tensor_parallel=2)
    problems = {p.setting: p for p in create().validate(plan)}
    assert set(problems) == {"dtype", "tensor_parallel_size"}
    assert problems["dtype"].proposed == "bfloat16"


def test_deterministic_ops_are_all_invariant(keep_threads):
    ops = Ops(create(deterministic=True), block_tokens=16, deterministic=True)
    for spec in (
        LinearSpec(dtype="bfloat16", in_features=4, out_features=4),
        RmsNormSpec(dtype="bfloat16", size=4, eps=1e-6),
    ):
        ops.bind(spec)
    assert all(c.provider == "native" and c.traits.batch_invariant for c in ops.report)
