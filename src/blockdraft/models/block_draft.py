"""BlockDraft: DFlash, DFlare, DSpark and every other combination of their components in one class.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding": a block is the last verified token followed by
mask tokens; one pass over the block, attending to fused hidden states of the verifier, proposes a token for every
mask slot. Slot k sits at position anchor + k and predicts the token there; slot 0 predicts nothing. With
`sample_from_anchor` (DSpark) every slot predicts the token behind it instead, and slot 0 the first one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.draft_config import DraftConfig
from blockdraft.models.fusion import CONTEXT_FUSION
from blockdraft.models.heads import ConfidenceHead, SequentialHead
from blockdraft.models.layers import Context, DraftLayer
from blockdraft.models.norm import RMSNorm
from blockdraft.models.positions import RotaryPositions
from blockdraft.models.vocabulary import DraftVocabulary
from blockdraft.ops.anchors import Blocks
from blockdraft.ops.attention import BlockAttention, training_attention
from blockdraft.ops.cached_attention import cached_attention
from blockdraft.ops.head import head_logits
from blockdraft.ops.masks import slot_mask
from blockdraft.ops.ragged_kv import RaggedKV


class BlockDraft(nn.Module):
    """A draft model. Embedding table and output head are the verifier's own and are shared by `share`.

    Trainable: fusion, layers, the final norm and DSpark's heads. `forward` is for training, `extend_context` and
    `block_hidden` are for decoding; both run the same layers.

    Attributes:
        sequential, confidence, vocabulary: None where the config has no such part.
        head_VE: rows of the output head for the tokens that the draft can propose, [Vd, E].
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fusion = CONTEXT_FUSION[config.context_fusion](config)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.positions = RotaryPositions(config)
        self.sequential = SequentialHead(config) if config.sequential_head != "none" else None
        self.confidence = ConfidenceHead(config) if config.confidence_head != "none" else None
        self.vocabulary = DraftVocabulary(config) if config.reduced else None
        self._embedding: Callable[[Tensor], Tensor] | None = None
        self.head_VE: Tensor | None = None

    def share(self, embedding: Callable[[Tensor], Tensor], head_VE: Tensor) -> None:
        """Share the verifier's frozen embeddings (of token ids) and output head; nothing is trained.

        Nothing is copied either, but the rows of a reduced vocabulary, whose map must be there by now.
        """
        if self.vocabulary is not None:
            assert self.vocabulary.consistent, "fill the vocabulary map first"
            head_VE = head_VE[self.vocabulary.ids]
        assert not isinstance(embedding, nn.Module), "would become a part of the draft: give a function"
        self._embedding = embedding
        self.head_VE = head_VE.detach()  # a plain tensor: nn.Module would save and move a parameter with the draft

    def share_as(self, other: BlockDraft) -> None:
        """Share what another draft of the same config shares."""
        self._embedding, self.head_VE = other._embedding, other.head_VE

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fresh weights.

        Matrices are normal with the usual 0.02; projections into the residual stream shrink with depth. The final
        norm starts where logits have a standard deviation of one: with a tied head and a norm of one, the first loss
        would be tens of nats.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.ndim == 2 and name != "fusion.layer_fusion_weights":
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * self.config.num_layers) if into_residual else 0.02
                parameter.copy_(torch.empty_like(parameter, device="cpu").normal_(0, std, generator=generator))
        if self.head_VE is not None:
            row_norm = self.head_VE[:: max(1, len(self.head_VE) // 4096)].float().square().sum(dim=-1).mean().sqrt()
            self.norm.weight.fill_(float(1 / row_norm))

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D] of verifier token ids, in the draft's compute dtype."""
        assert self._embedding is not None, "borrow() the verifier's tables first"
        return self._embedding(ids).to(self.norm.weight.dtype)

    def predicted(self, hidden_NBD: Tensor) -> Tensor:
        """Hidden states of the slots that propose a token, [N, K, D]: proposal i is for position anchor + i + 1."""
        return hidden_NBD[:, self.config.first_predicted :]

    def slots_for(self, k: int) -> int:
        """Slots that a block needs to propose so many tokens."""
        return k + self.config.first_predicted

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [..., Vd] of hidden states after the final norm, before any sequential correction."""
        assert self.head_VE is not None, "borrow() the verifier's tables first"
        return head_logits(hidden, self.head_VE).float()

    def to_verifier_ids(self, draft_ids: Tensor) -> Tensor:
        """The verifier's ids of tokens chosen from the draft's logits."""
        return draft_ids if self.vocabulary is None else self.vocabulary.to_verifier(draft_ids)

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """float32 logits [...] of acceptance, given the verifier ids before the slots; None without such a head."""
        if self.confidence is None:
            return None
        embedded = None if self.sequential is None else self.sequential.embed(previous, hidden.dtype)
        return self.confidence(hidden, embedded)

    def _block_ids(self, anchor_ids: Tensor, block_size: int) -> Tensor:
        """[anchor, mask, mask, ...] for every anchor id, [..., B]."""
        ids = anchor_ids.new_full((*anchor_ids.shape, block_size), self.config.mask_token_id)
        ids[..., 0] = anchor_ids
        return ids

    def _contexts(self, taps: Tensor, positions: Tensor, length: int) -> list[Context]:
        """Per draft layer, what it reads of fused taps [..., L, E] at `positions` [...]."""
        fused = self.fusion(taps)
        cos, sin = self.positions(positions, length)
        last = fused.shape[-2] - 1
        return [Context(fused[..., min(index, last), :], cos, sin) for index in range(len(self.layers))]

    def forward(
        self, taps_TLE: Tensor, tokens_T: Tensor, positions_T: Tensor, blocks: Blocks, block_size: int | None = None
    ) -> Tensor:
        """Hidden states of every slot of every block of a packed row, after the final norm, [N, B, D].

        Args:
            taps_TLE: the verifier's taps at every position.
            tokens_T: token ids; only those at anchors are read.
            positions_T: positions within each example.
            block_size: slots of a block; the trained size unless another K is to be measured.
        """
        block_size = block_size or self.config.block_size
        slots = torch.arange(block_size, device=tokens_T.device)
        length = int(positions_T.max()) + block_size + 1 if len(positions_T) else 1
        contexts = self._contexts(taps_TLE, positions_T, length)
        x = self.embed(self._block_ids(tokens_T[blocks.anchors], block_size))
        cos, sin = self.positions(positions_T[blocks.anchors][:, None] + slots, length)
        attentions: dict[tuple[int | None, bool], BlockAttention] = {}
        kinds = zip(self.config.windows, self.config.causal, strict=True)
        for layer, context, kind in zip(self.layers, contexts, kinds, strict=True):
            if kind not in attentions:
                attentions[kind] = training_attention(blocks, len(tokens_T), block_size, *kind)
            x = layer(x, cos, sin, attentions[kind], context)
        return self.norm(x)

    def compile_layers(self) -> None:
        """Let torch.compile fuse the feed-forward layers, half of a draft's work; names of parameters stay."""
        for layer in self.layers:
            cast(DraftLayer, layer).mlp.compile(dynamic=True)

    def cache(self, num_rows: int) -> RaggedKV:
        """An empty context cache for decoding."""
        return RaggedKV(self.config.num_layers, num_rows, self.norm.weight.device)

    def extend_context(self, cache: RaggedKV, taps_RWLE: Tensor) -> None:
        """Append context of `W` further positions a row; the caller commits those that were verified."""
        positions = cache.positions(taps_RWLE.shape[1])
        contexts = self._contexts(taps_RWLE, positions, cache.longest + taps_RWLE.shape[1])
        for index, (layer, context) in enumerate(zip(self.layers, contexts, strict=True)):
            key, value = cast(DraftLayer, layer).self_attn.context_kv(context)
            cache.write(index, key.transpose(1, 2), value.transpose(1, 2))

    def block_hidden(self, cache: RaggedKV, anchor_ids_R: Tensor, block_size: int) -> Tensor:
        """Hidden states [R, B, D] of one block a row, whose anchor stands right behind the row's context.

        The block's own keys are written behind the context and never committed.
        """
        positions = cache.positions(block_size)
        x = self.embed(self._block_ids(anchor_ids_R, block_size))
        cos, sin = self.positions(positions, cache.longest + block_size)
        masks: dict[tuple[int | None, bool], Tensor] = {}
        for index, layer in enumerate(self.layers):
            kind = (self.config.windows[index], self.config.causal[index])
            if kind not in masks:
                masks[kind] = self._decoding_mask(cache, block_size, *kind)

            attend = functools.partial(cached_attention, cache=cache, layer=index, mask_RBC=masks[kind])
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    @staticmethod
    def _decoding_mask(cache: RaggedKV, block_size: int, window: int | None, causal: bool) -> Tensor:
        """Which cached positions are visible to each slot, bool [R, B, C].

        The block itself stands at lengths .. lengths + B.
        """
        keys = torch.arange(cache.longest + block_size, device=cache.lengths.device)
        anchors = cache.lengths[:, None]
        context = keys < anchors
        context = context[:, None].expand(-1, block_size, -1)
        if window is not None:
            slots_at = anchors + torch.arange(block_size, device=keys.device)
            context = context & (keys > (slots_at - window)[..., None])
        offsets = keys - anchors
        own = (offsets >= 0) & (offsets < block_size)
        slots = slot_mask(block_size, causal, keys.device)[:, offsets.clamp(0, block_size - 1)].transpose(0, 1)
        return context | (own[:, None] & slots)
