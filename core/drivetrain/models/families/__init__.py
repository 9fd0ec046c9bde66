"""Model families by architecture. A family turns a Hugging Face style configuration into a ``ModelSpec``.

The table holds strings: a family's module is imported when a model asks for it. A module has ``ARCHITECTURES``,
``spec(config, dtype) -> ModelSpec`` and ``naming(spec) -> Naming``; docs/model-guide.md shows how to write one.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from drivetrain.errors import ModelError
from drivetrain.models.naming import Naming
from drivetrain.models.spec import ModelSpec

FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "drivetrain.models.families.llama",
    "Gemma2ForCausalLM": "drivetrain.models.families.gemma2",
    "GraniteForCausalLM": "drivetrain.models.families.granite",
    "GraniteSWAForCausalLM": "drivetrain.models.families.granite_swa",
    "MistralForCausalLM": "drivetrain.models.families.mistral",
    "Olmo2ForCausalLM": "drivetrain.models.families.olmo2",
    "Phi3ForCausalLM": "drivetrain.models.families.phi3",
    "Qwen2ForCausalLM": "drivetrain.models.families.qwen2",
    "Qwen3ForCausalLM": "drivetrain.models.families.qwen3",
    "Starcoder2ForCausalLM": "drivetrain.models.families.starcoder2",
    "Gemma3ForCausalLM": "drivetrain.models.families.gemma3",
    "Gemma3ForConditionalGeneration": "drivetrain.models.families.gemma3",
}


class Family(Protocol):
    """What a family's module offers."""

    @property
    def ARCHITECTURES(self) -> tuple[str, ...]: ...

    def spec(self, config: Mapping[str, Any], dtype: str) -> ModelSpec:
        """Read a configuration. ModelError naming the key that is missing or not supported."""

    def naming(self, spec: ModelSpec) -> Naming:
        """Say how the family's checkpoints name the parameters."""


def read_spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Return the model that a configuration describes, with weights and activations of ``dtype`` (torch's name).

    ModelError for an unknown architecture, naming the nearest one, and for values that the family can't serve.
    """
    return _family(architecture_of(config)).spec(config, dtype)


def naming_of(spec: ModelSpec) -> Naming:
    """Return the family's naming of that model's parameters."""
    return _family(spec.architecture).naming(spec)


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the configuration's architecture: the first of ``architectures`` that has a family."""
    names = [str(name) for name in config.get("architectures") or ()]
    if not names:
        raise ModelError("the configuration has no architectures", fix=f"name one of {', '.join(FAMILIES)} there")
    for name in names:
        if name in FAMILIES:
            return name
    near = difflib.get_close_matches(names[0], FAMILIES, 1, cutoff=0.6)
    hint = f"; the nearest is {near[0]}" if near else ""
    raise ModelError(
        f"no model family serves the architecture {', '.join(names)}{hint}", fix=f"supported: {', '.join(FAMILIES)}"
    )


def _family(architecture: str) -> Family:
    module: Any = importlib.import_module(FAMILIES[architecture])
    return module  # type: ignore[no-any-return]
