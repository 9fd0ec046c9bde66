"""Finding, refusing and choosing backends, on wheels that are really built and installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging import wheels
from tests.packaging.wheels import CleanVenv, TestWheel

Make = Callable[..., "CleanVenv"]
CHOOSE = """
from drivetrain.errors import DeviceError
from drivetrain.select.choose import choose
try:
    c = choose({device!r}, {options!r}, timeout={timeout})
    import sys
    print("chose", c.name, c.wheel, c.devices, dict(c.options), "torch" in sys.modules)
except DeviceError as error:
    print("refused", error)
"""


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> CleanVenv:
    """The engine's and the contract's wheels, built and installed once."""
    target = tmp_path_factory.mktemp("ours")
    built = [
        wheels.build_wheel(wheels.ROOT / part, target / part.replace("/", "-")) for part in ("core", "plugins/api")
    ]
    venv = wheels.make_venv(target / "venv")
    venv.install(*built)
    return venv


@pytest.fixture
def make(tmp_path: Path, ours: CleanVenv) -> Make:
    def build(*test_wheels: TestWheel) -> CleanVenv:
        venv = wheels.make_venv(tmp_path / "venv", like=ours)
        built = [wheel.build(tmp_path) for wheel in test_wheels]
        if built:
            venv.install(*built)
        return venv

    return build


def chosen(venv: CleanVenv, device: str, timeout: float = 30.0, **options: str) -> str:
    done = venv.code(CHOOSE.format(device=device, options=options, timeout=timeout))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ACME = TestWheel(name="acme", wheel="drivetrain-acme")
CPU = TestWheel(name="cpu", wheel="drivetrain-cpu")


def test_the_wheel_asked_for_is_chosen_without_torch(make: Make) -> None:
    venv = make(ACME)
    assert chosen(venv, "acme") == "chose acme drivetrain-acme (0,) {'speed': 3} False"
    assert chosen(venv, "acme:1,0") == "chose acme drivetrain-acme (1, 0) {'speed': 3} False"
    out = chosen(venv, "acme:7")
    assert "there is no device 7" in out and "0, 1" in out
    assert "not a list of numbers" in chosen(venv, "acme:x")
    assert "names a device twice" in chosen(venv, "acme:1,1")


def test_missing_wheel_names_the_nearest_and_the_fix(make: Make) -> None:
    venv = make(ACME)
    assert "did you mean --device acme?" in chosen(venv, "acmee")
    out = chosen(venv, "zeta")
    assert "no installed wheel provides it" in out and "pip install drivetrain-zeta" in out
    done = venv.run("serve", "no-such-model", "--device", "zeta")
    assert done.returncode == 2 and "zeta" in done.stderr and "no-such-model" not in done.stderr


def test_import_that_raises(make: Make) -> None:
    venv = make(TestWheel(name="acme", wheel="drivetrain-acme", prelude="raise OSError('libacme.so.9 not found')\n"))
    out = chosen(venv, "acme")
    assert out.startswith("refused") and "drivetrain-acme 1.2.3" in out
    assert "OSError: libacme.so.9 not found" in out and "reinstall" in out


def test_probe_that_refuses(make: Make) -> None:
    body = 'return Unavailable(reason="driver 535 is too old", fix="install driver 570 or newer")'
    venv = make(TestWheel(name="acme", wheel="drivetrain-acme", probe=body))
    out = chosen(venv, "acme")
    assert "driver 535 is too old" in out and "install driver 570 or newer" in out


def test_probe_that_raises(make: Make) -> None:
    venv = make(TestWheel(name="acme", wheel="drivetrain-acme", probe='raise KeyError("bus")'))
    assert "probe raised KeyError: 'bus'" in chosen(venv, "acme")


def test_probe_that_finds_nothing(make: Make) -> None:
    assert "it found no device" in chosen(
        make(TestWheel(name="acme", wheel="drivetrain-acme", probe="return []")), "acme"
    )


def test_probe_that_hangs(make: Make) -> None:
    venv = make(TestWheel(name="acme", wheel="drivetrain-acme", probe="import time; time.sleep(3600)"))
    out = chosen(venv, "acme", timeout=1.5)
    assert "no answer within 1.5 s" in out and "--probe-timeout" in out


def test_probe_that_crashes(make: Make) -> None:
    venv = make(TestWheel(name="acme", wheel="drivetrain-acme", probe="import os; os.kill(os.getpid(), 11)"))
    assert "ended with signal 11" in chosen(venv, "acme")


def test_noisy_probe_is_still_understood(make: Make) -> None:
    body = 'print("banner {}"); import sys; print("x", file=sys.stderr); return [DeviceRecord(index=0, name="one")]'
    assert chosen(make(TestWheel(name="acme", wheel="drivetrain-acme", probe=body)), "acme").startswith("chose acme")


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        (("drivetrain-api>=9.0",), "upgrade the engine"),
        (("drivetrain-api<0.1",), "pip install -U drivetrain-acme"),
        ((), "does not say which drivetrain-api"),
    ],
)
def test_contract_range_is_checked_before_import(make: Make, requires: tuple[str, ...], expected: str) -> None:
    marker = "import pathlib, os; pathlib.Path(os.environ['HOME'], 'imported').write_text('x')\n"
    venv = make(TestWheel(name="acme", wheel="drivetrain-acme", requires=requires, prelude=marker))
    out = chosen(venv, "acme")
    assert out.startswith("refused") and "drivetrain-acme 1.2.3" in out and expected in out
    assert not (venv.path / "imported").exists()


def test_two_wheels_for_one_name(make: Make) -> None:
    venv = make(ACME, TestWheel(name="acme", wheel="acme-fork"), CPU)
    out = chosen(venv, "acme")
    assert "2 wheels claim that name" in out and "acme-fork 1.2.3" in out and "drivetrain-acme 1.2.3" in out
    assert chosen(venv, "cpu").startswith("chose cpu")


def test_alias_is_the_same_backend(make: Make) -> None:
    venv = make(TestWheel(name="acme", wheel="drivetrain-acme", entries=("acme", "acme-ai")))
    assert chosen(venv, "acme-ai").startswith("chose acme-ai drivetrain-acme")
    assert chosen(venv, "auto").startswith("chose acme drivetrain-acme")


def test_other_wheels_are_not_imported(make: Make) -> None:
    bad = TestWheel(name="bad", wheel="drivetrain-bad", prelude="import os; os._exit(9)\n")
    assert chosen(make(ACME, bad), "acme").startswith("chose acme")


def test_auto_with_none(make: Make) -> None:
    assert "no backend wheel is installed" in chosen(make(), "auto")


def test_auto_with_one_takes_it(make: Make) -> None:
    assert chosen(make(ACME, CPU), "auto").startswith("chose acme")


def test_auto_takes_cpu_only_without_any_accelerator_wheel(make: Make) -> None:
    assert chosen(make(CPU), "auto").startswith("chose cpu")


def test_auto_with_several_lists_them(make: Make) -> None:
    out = chosen(make(ACME, TestWheel(name="zeta", wheel="drivetrain-zeta"), CPU), "auto")
    assert "2 accelerators are usable" in out and "acme" in out and "zeta" in out


def test_auto_leaves_emulated_devices_out(make: Make) -> None:
    venv = make(TestWheel(name="sham", wheel="drivetrain-sham", emulated=True), CPU)
    assert chosen(venv, "auto").startswith("chose cpu")
    assert chosen(venv, "sham").startswith("chose sham")


def test_auto_never_falls_back_from_a_broken_accelerator(make: Make) -> None:
    body = 'return Unavailable(reason="no permission on /dev/acme0", fix="join group render")'
    out = chosen(make(TestWheel(name="acme", wheel="drivetrain-acme", probe=body), CPU), "auto")
    assert out.startswith("refused") and "/dev/acme0" in out and "--device cpu" in out


def test_backend_options(make: Make) -> None:
    venv = make(ACME)
    assert "{'speed': 7}" in chosen(venv, "acme", speed="7")
    assert "did you mean speed?" in chosen(venv, "acme", sped="7")
    assert "give a int" in chosen(venv, "acme", speed="fast")


def test_environment_clash_names_both_values(make: Make) -> None:
    venv = make(TestWheel(name="acme", wheel="drivetrain-acme", environment={"ACME_ALLOC": "pool"}))
    code = """
    import os
    from drivetrain.errors import DeviceError
    from drivetrain.select.choose import choose, open_backend
    from drivetrain_api.v1 import ConfigView
    choice = choose("acme", {})
    try:
        open_backend(choice, ConfigView(options=choice.options))
    except DeviceError as error:
        print(error, "|", os.environ["ACME_ALLOC"])
    """
    clash = venv.code(code, environment={"ACME_ALLOC": "async"}).stdout
    assert "needs ACME_ALLOC=pool" in clash and "sets ACME_ALLOC=async" in clash and clash.strip().endswith("async")
    opened = venv.code(code).stdout
    assert "opened (0,) {'speed': 3}" in opened and opened.strip().endswith("pool")


def test_engine_devices_shows_all_and_why_not(make: Make) -> None:
    bad = TestWheel(name="bad", wheel="drivetrain-bad", prelude="raise ImportError('no libbad')\n")
    done = make(ACME, bad).run("devices", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["names"][0]: row for row in json.loads(done.stdout)}
    assert rows["acme"]["outcome"] == "usable" and len(rows["acme"]["devices"]) == 2
    assert rows["bad"]["outcome"] == "import_failed" and "no libbad" in rows["bad"]["reason"]


def test_missing_hook_is_named(make: Make) -> None:
    cut = "import drivetrain_api.v1 as _a\n_real = _a.hookimpl\n"
    wheel = TestWheel(name="acme", wheel="drivetrain-acme", prelude=cut)
    venv = make(wheel)
    source = venv.site / "drivetrain_acme" / "__init__.py"
    source.write_text(source.read_text().replace("@hookimpl\n    def create", "def create"))
    assert "implements no create" in chosen(venv, "acme")
