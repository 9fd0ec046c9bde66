"""What decides, configures, serves and answers ``--help`` loads without torch.

Every module of the core and the contract is found by walking the packages and imported, in a child process,
while an import of torch raises; only the modules under ``USES_TORCH`` are left out, so a new module is
covered from its first day. The command's ``--help`` runs under the same rule.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"drivetrain": "core", "drivetrain_api": "plugins/api"}
# Modules that work on tensors. A name covers the package below it.
USES_TORCH = (
    "drivetrain.conformance",
    "drivetrain.dist.collectives",
    "drivetrain.dist.executors",
    "drivetrain.dist.groups",
    "drivetrain.dist.worker",
    "drivetrain.models",
    "drivetrain.ops",
    "drivetrain.runner",
    "drivetrain.starting",
)
COMMAND = "drivetrain.cli.main"

CHILD = '''
import importlib, io, json, sys, traceback
from contextlib import redirect_stdout

class Refuse:
    """Refuses torch and remembers that it was asked for, also where the error is swallowed."""
    asked = ""
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            frames = [f for f in traceback.extract_stack()[:-1] if "importlib" not in f.filename]
            Refuse.asked = f"{frames[-1].filename}:{frames[-1].lineno}"
            raise ModuleNotFoundError(f"No module named {name!r} (refused)", name=name)

sys.meta_path.insert(0, Refuse())
failures = {}
for job in json.loads(sys.argv[1]):
    Refuse.asked = ""
    name, *help_of = job.split()
    try:
        module = importlib.import_module(name)
        if help_of:
            with redirect_stdout(io.StringIO()) as out:
                try:
                    module.main(["--help"])
                except SystemExit as end:
                    if end.code:
                        raise RuntimeError(f"--help ended with {end.code}") from end
            if "usage" not in out.getvalue().lower():
                raise RuntimeError("--help printed no usage")
    except BaseException as error:
        failures[job] = f"{type(error).__name__}: {error}"
    if Refuse.asked:
        failures[job] = f"imports torch at {Refuse.asked}"
print(json.dumps(failures))
'''


class Report(NamedTuple):
    """``failures``: module (or ``module --help``) to what happened."""

    checked: list[str]
    failures: dict[str, str]


def modules(root: Path, packages: dict[str, str] | None = None) -> list[str]:
    """Return the dotted names of every module that must load without torch, sorted."""
    names: list[str] = []
    for package, folder in (packages or PACKAGES).items():
        base = root / folder
        for path in (base / package).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(name for name in names if not _left_out(name))


def _left_out(name: str) -> bool:
    return name.endswith(".__main__") or any(name == top or name.startswith(top + ".") for top in USES_TORCH)


def check(root: Path, packages: dict[str, str] | None = None) -> Report:
    """Import every module in one child without torch; RuntimeError when the child itself breaks."""
    packages = packages or PACKAGES
    jobs = modules(root, packages)
    if COMMAND in jobs:
        jobs.append(f"{COMMAND} --help")
    paths = [str(root / folder) for folder in packages.values()]
    code = f"import sys; sys.path[:0] = {paths!r}\n{CHILD}"
    command = [sys.executable, "-c", code, json.dumps(jobs)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if child.returncode:
        raise RuntimeError(f"the importing child ended with {child.returncode}:\n{child.stderr}")
    return Report(jobs, json.loads(child.stdout.splitlines()[-1]))


def main(arguments: list[str] | None = None) -> int:
    """Print every module that needs torch and the number checked; 1 when there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--root", type=Path, default=ROOT)
    report = check(parser.parse_args(arguments).root)
    for job, what in sorted(report.failures.items()):
        print(f"{job}: {what}")
    print(f"without torch: {len(report.checked)} checked, {len(report.failures)} failed")
    return 1 if report.failures or not report.checked else 0


if __name__ == "__main__":
    sys.exit(main())
