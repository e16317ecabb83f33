"""The contract: the facts that trainer, reference engine and server must share.

It is derived once, when a draft is created, saved inside the checkpoint's config.json under the key ``blockdraft``
and compared wherever draft and verifier meet. A field that could not change an outcome does not belong here; the
tests perturb every one of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from blockdraft.errors import InputError
from blockdraft.progress import warn
from blockdraft.typed import checked

# 2: a window moves with the slot; in 1 it was measured from the anchor. 3: `embedding`. 4: `matrices_digest`.
# 5: without `final_norm`, which nothing read and which was wrong for norms that are neither w nor (1 + w).
CONTRACT_VERSION = 5
TAP_CONVENTION = "after_layers"  # tap i = residual stream after i decoder layers (vLLM's and Speculators' numbering)
TAP_KIND = "residual_stream"  # never a branch before its residual add


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierIdentity:
    """What makes a verifier this verifier, as far as a draft is concerned."""

    name: str
    """Name or folder it was loaded from; informative, a moved folder is the same verifier."""
    revision: str | None
    """Commit of the hub repository it was loaded from; informative. None for a folder."""
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    """Rows of its output head (padded), not the tokenizer's length."""
    embedding: str
    """What a draft shares of its embeddings: the "table" of raw rows, or the "module", with scale and special rows."""
    tokenizer_hash: str
    """SHA-256 over the vocabulary in id order, 16 digits."""
    norms_hash: str
    """SHA-256 over its norm weights rounded to bfloat16, 16 digits: tells a base model from its fine-tuned sister,
    yet is the same for a bfloat16, float32 or weight-quantized copy."""
    matrices_digest: str | None
    """SHA-256 over sampled rows of its matrices (`verifiers/matrices.py`), 16 digits. None: nothing to compare, since
    the matrices are quantized or the checkpoint is older than this field."""

    COMPARED: ClassVar[tuple[str, ...]] = (
        "architecture",
        "hidden_size",
        "num_layers",
        "vocab_size",
        "embedding",
        "tokenizer_hash",
        "norms_hash",
        "matrices_digest",
    )

    def matrices_comparable(self, other: VerifierIdentity) -> bool:
        """Whether both say what their matrices are."""
        return self.matrices_digest is not None and other.matrices_digest is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """What a draft was trained against and how its blocks are laid out."""

    version: int
    method: str
    context_fusion: str
    context_kv: str
    sequential_head: str
    markov_rank: int
    confidence_head: str
    confidence_with_previous: bool
    verifier: VerifierIdentity
    tap_ids: tuple[int, ...]
    tap_convention: str
    tap_kind: str
    tap_standardisation: str
    """"none", "folded" (already inside the projection) or "explicit" (tensors tap_direction and tap_scale)."""
    logit_softcap: float | None
    mask_token_id: int
    sample_from_anchor: bool
    block_size: int
    default_k: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    draft_vocab_size: int
    vocab_map_hash: str | None
    compute_dtype: str
    """The dtype the draft was trained to compute in."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, raw: Any, where: str) -> Contract:
        """Read an upgraded contract.

        Raises:
            InputError: a missing or unknown field, a value of another type, an unknown version or convention.
        """
        contract: Contract = checked(cls, raw, where)
        known = {"version": CONTRACT_VERSION, "tap_convention": TAP_CONVENTION, "tap_kind": TAP_KIND}
        for name, value in known.items():
            if getattr(contract, name) != value:
                raise InputError(f"{where} {name}", getattr(contract, name), f"this blockdraft knows {value!r} only")
        return contract

    def require_verifier(self, found: VerifierIdentity, logit_softcap: float | None) -> None:
        """Reject a verifier other than the one the draft was trained for, naming the first field that differs.

        Says so in one line where the matrices of the two cannot be compared.
        """
        names = list(VerifierIdentity.COMPARED)
        if not self.verifier.matrices_comparable(found):
            names.remove("matrices_digest")
            warn(f"the matrices of {found.name} were not compared, only its norms: {self._why_not_compared(found)}")
        pairs = [
            *((name, getattr(self.verifier, name), getattr(found, name)) for name in names),
            ("logit_softcap", self.logit_softcap, logit_softcap),
        ]
        for name, wanted, got in pairs:
            if wanted != got:
                raise InputError(
                    f"verifier {name}",
                    f"the draft was trained for {wanted} ({self.verifier.name}), this one has {got} ({found.name})",
                    "load the verifier the draft was trained for, or train a draft for this one",
                )

    def _why_not_compared(self, found: VerifierIdentity) -> str:
        if found.matrices_digest is None:
            return "they are quantized, or stored in a form whose rows cannot be compared"
        return "the checkpoint has no digest of them (it is older, or its verifier was quantized)"

    def require_k(self, k: int, field: str = "--k") -> None:
        """Refuse a number of proposed tokens that the block does not have slots for."""
        most = self.block_size if self.sample_from_anchor else self.block_size - 1
        if not 1 <= k <= most:
            raise InputError(field, k, f"a draft of block size {self.block_size} proposes 1 to {most} tokens")


def upgraded(raw: Any, where: str) -> Any:
    """A contract of version 3 or 4 as one of version 5; anything else as it is.

    Version 3 says nothing of the matrices, and both state a final norm that nothing reads.

    Raises:
        InputError: it scales embeddings, which no engine did.
    """
    if not isinstance(raw, dict) or raw.get("version") not in (3, 4) or not isinstance(raw.get("verifier"), dict):
        return raw
    kept, verifier = dict(raw), dict(raw["verifier"])
    kept.pop("final_norm", None)
    if raw["version"] == 3:
        scale = kept.pop("embedding_scale", None)
        if scale != 1.0:
            raise InputError(
                f"{where} embedding_scale", scale, "must be 1.0; engines do not scale; train the draft again"
            )
        verifier |= {"revision": None, "matrices_digest": None}
    return {**kept, "version": CONTRACT_VERSION, "verifier": verifier}
