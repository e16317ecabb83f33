"""Presets: combinations of components that the literature has a name for, and what else goes with the name.

A draft is one class whatever its preset. Another combination of known components becomes a preset by an entry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from blockdraft.choices import ConfidenceHead, ContextFusion, ContextKV, SequentialHead

CUSTOM = "blockdraft"  # the method's name where the components are nobody's preset
CUSTOM_ARCHITECTURE = "BlockDraftModel"


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """The components that give a method its name, as `DraftConfig` describes them."""

    context_fusion: ContextFusion
    context_kv: ContextKV
    sequential_head: SequentialHead = "none"
    confidence_head: ConfidenceHead = "none"
    confidence_with_previous: bool = False
    sample_from_anchor: bool = False

    @classmethod
    def of(cls, described: Any) -> Components:
        """The components of what has a field for each, such as a DraftConfig."""
        return cls(**{name: getattr(described, name) for name in component_names()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named combination.

    Attributes:
        optional: components that a draft of this name may have otherwise.
        architecture: in config.json, for readers of the format.
        loss: what is trained towards unless told otherwise.
        vllm_method: the method under which vLLM has a class of its own for it; None where ours serves it.
    """

    components: Components
    optional: tuple[str, ...] = ()
    architecture: str = CUSTOM_ARCHITECTURE
    loss: str = "ce"
    vllm_method: str | None = None

    def names(self, components: Components) -> bool:
        """Whether a draft with these components has this name."""
        return all(
            getattr(self.components, name) == getattr(components, name)
            for name in component_names()
            if name not in self.optional
        )


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "dflash": Preset(
            components=Components(context_fusion="projected", context_kv="shared"),
            architecture="DFlashDraftModel",
            vllm_method="dflash",
        ),
        "dflare": Preset(
            components=Components(context_fusion="layerwise", context_kv="separate"),
            architecture="DFlareDraftModel",
        ),
        # Published drafts of this name learn the verifier's distribution; the others learn its tokens.
        "dspark": Preset(
            components=Components(
                context_fusion="projected",
                context_kv="shared",
                sequential_head="markov",
                confidence_head="linear",
                confidence_with_previous=True,
                sample_from_anchor=True,
            ),
            optional=("sequential_head", "confidence_head", "confidence_with_previous", "sample_from_anchor"),
            architecture="DSparkDraftModel",
            loss='{"ce": 0.1, "tv": 0.9}',
            vllm_method="dspark",
        ),
    }
)

if TYPE_CHECKING:
    SpeculatorType = str
else:
    SpeculatorType = Literal[tuple(PRESETS)]


def component_names() -> tuple[str, ...]:
    """The fields of `Components`."""
    return tuple(field.name for field in dataclasses.fields(Components))


def preset_of(components: Components) -> str:
    """The first name that fits, or CUSTOM: a draft that two presets would name has that of the narrower, above."""
    return next((name for name, preset in PRESETS.items() if preset.names(components)), CUSTOM)


def architecture_of(method: str) -> str:
    """The architecture that config.json states for a method."""
    return PRESETS[method].architecture if method in PRESETS else CUSTOM_ARCHITECTURE


def vllm_method_of(method: str) -> str | None:
    """The method under which vLLM has a class of its own for such drafts."""
    return PRESETS[method].vllm_method if method in PRESETS else None
