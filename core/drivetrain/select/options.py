"""``--backend-option key=value``: checked and typed against what the backend says it understands."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from drivetrain.errors import DeviceError
from drivetrain_api.v1.hooks import BackendInfo, OptionSpec

Value = str | int | float | bool | None
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def resolve_options(info: BackendInfo, given: Mapping[str, str]) -> dict[str, Value]:
    """Return every option of the backend, given or default. DeviceError for an unknown key or a bad value."""
    known = {spec.key: spec for spec in info.options}
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            have = ", ".join(sorted(known)) or "it has none"
            hint = f"did you mean {near[0]}?" if near else f"options of {info.name}: {have}"
            raise DeviceError(f"--backend-option {key}: {info.name} has no such option", fix=hint)
    return {key: _typed(spec, given[key]) if key in given else spec.default for key, spec in known.items()}


def _typed(spec: OptionSpec, text: str) -> Value:
    if spec.choices and text not in spec.choices:
        raise DeviceError(f"--backend-option {spec.key}={text}", fix=f"one of {', '.join(spec.choices)}")
    try:
        if spec.kind == "int":
            return int(text)
        if spec.kind == "float":
            return float(text)
    except ValueError:
        raise DeviceError(f"--backend-option {spec.key}={text}", fix=f"{spec.help}: give a {spec.kind}") from None
    if spec.kind == "bool":
        if text.lower() not in TRUE + FALSE:
            raise DeviceError(f"--backend-option {spec.key}={text}", fix="give true or false")
        return text.lower() in TRUE
    return text
