"""The contract: the facts that trainer, reference engine and server must share.

It is made once, when a draft is created, saved inside the checkpoint's config.json under the key ``blockdraft``
and compared wherever draft and verifier meet. A field that could not change an outcome does not belong here; the
tests perturb every one of them.

Target layer i is the residual stream after i decoder layers (vLLM's and Speculators' numbering), never a branch before
its residual add.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from blockdraft.draft_config import DraftConfig
from blockdraft.errors import InputError
from blockdraft.progress import warn
from blockdraft.typed import checked

# 6: holds the draft's config; before, it repeated most of it. What earlier versions were: `checkpoints/older.py`.
CONTRACT_VERSION = 6


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
    """SHA-256 over its norm weights rounded to bfloat16, 16 digits: tells a base model from its fine-tuned variant,
    yet is the same for a bfloat16, float32 or weight-quantized copy."""
    matrices_digest: str | None
    """SHA-256 over sampled rows of its matrices (`verifiers/matrices.py`), 16 digits. None: nothing to compare, since
    the matrices are quantized or absent, or the checkpoint is older than this field."""

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
    verifier: VerifierIdentity
    logit_softcap: float | None
    draft: DraftConfig
    vocab_map_hash: str | None
    """SHA-256 over the verifier ids of a reduced vocabulary, 16 digits; None for the full one."""
    compute_dtype: str
    """The dtype the draft was trained to compute in."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, raw: Any, where: str) -> Contract:
        """Read a contract of this version.

        Raises:
            InputError: a missing or unknown field, a value of another type, another version.
        """
        contract: Contract = checked(cls, raw, where)
        if contract.version != CONTRACT_VERSION:
            raise InputError(
                f"{where} version", contract.version, f"this blockdraft knows {CONTRACT_VERSION} and older"
            )
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
            return "they are quantized, absent, or stored in a form whose rows cannot be compared"
        return "the checkpoint has no digest of them (it is older, or its verifier was quantized or parts of one)"

    def require_k(self, k: int, field: str = "--k") -> None:
        """Reject a number of proposed tokens that the block does not have slots for."""
        most = self.draft.num_speculative_tokens
        if not 1 <= k <= most:
            raise InputError(field, k, f"a draft of block size {self.draft.block_size} proposes 1 to {most} tokens")
