"""docs/verifiers.md, written from the table of families that the tests hold.

PYTHONPATH=tests python -m verifiers.page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from blockdraft.vllm_plugin.support import T5GEMMA2, support_of
from verifiers.families import (
    BIAS,
    LAYER_TYPE,
    NO_LAYERS,
    NO_ROTARY,
    NOT_TRIED,
    REJECTED,
    RIGHT,
    ROPE_TYPE,
    SHAPE,
    UNLIKE,
    Family,
)

PAGE = Path(__file__).parent.parent.parent / "docs" / "verifiers.md"
REASONS = {
    NO_LAYERS: "no list of decoder layers that can be tapped",
    NO_ROTARY: "learned positions",
    LAYER_TYPE: "layers other than full and sliding attention",
    ROPE_TYPE: "rotary angles depend on the length of the text",
    BIAS: "output head with a bias",
    SHAPE: "config does not state the shape of a layer",
    UNLIKE: "its code cannot be driven",
}
HEAD = """# Verifiers

Which models a draft can be trained for, and which of them vLLM 0.32 serves with one. This page is made from the table
of the tests (`tests/verifiers/families.py`), so it cannot say more than they show.

**In process** means: `blockdraft` loads the model with transformers, trains with its hidden states, evaluates and
decodes. For each family marked *yes*, a tiny random model of it is compared with transformers' own eager forward:
whole texts of 100 tokens (longer than every window), the hidden states after each layer, cached decoding over rows of
unequal length, and a draft that is trained for a step, decoded with and evaluated in one pass.

The same comparison runs whenever a verifier is loaded (`verifiers/proof.py`), with windows shortened so that its text
passes them. In float32 the worst position may differ by 0.001 of the spread of the logits, in bfloat16 the median
position by 0.2. A family that fails, or that is not understood, is rejected in one line. Weights that lack a tensor
are rejected, too.

**Served with a draft** says what `blockdraft serve` and `vllm serve` do. *Tested* families have been served with a
draft whose every proposal was the trainer's; the others are read from vLLM's classes. `blockdraft check` says it for
a checkpoint, and `serve` before an engine starts.

T5Gemma 2 (`t5gemma2`) is the one family with an encoder: {t5gemma2}. Other multimodal models are not loaded,
except for those in the table, of which the text model is used.

A *no* under "in process" is about hidden states, evaluation and decoding. From hidden states that were made elsewhere,
`train` needs only embedding, output head and final norm ([Data](data.md#hidden-states-on-disk)), which also come from
multimodal models and from families with linear attention.

| model type | class | in process | served with a draft |
|---|---|---|---|
"""


def rows() -> Iterator[str]:
    """A line for each model type; those that are right in some configuration come first."""
    for model_type in dict.fromkeys(
        family.model_type for family in [*sorted(RIGHT, key=by_name), *sorted(REJECTED, key=by_name)]
    ):
        right = [family for family in RIGHT if family.model_type == model_type]
        not_so = [family for family in REJECTED if family.model_type == model_type]
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        said = "yes" if right else f"no: {reason(not_so[0])}"
        if right and not_so:
            said += "; not with " + " or ".join(
                f"{family.note or 'other layers'} ({reason(family)})" for family in not_so
            )
        yield f"| {model_type} | {architecture} | {said} | {support_of(architecture).text if right else '-'} |"


def by_name(family: Family) -> str:
    return family.model_type


def reason(family: Family) -> str:
    assert family.rejected is not None
    return REASONS[family.rejected]


def page() -> str:
    """The whole page."""
    tail = f"\nNot tested here, and checked like all others when they are loaded: {', '.join(sorted(NOT_TRIED))}.\n"
    return HEAD.format(t5gemma2=support_of(T5GEMMA2).text) + "".join(row + "\n" for row in rows()) + tail


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
