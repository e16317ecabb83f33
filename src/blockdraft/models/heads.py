"""DSpark's heads: a correction of each slot's logits by the token before it, and an estimate of its acceptance.

The backbone runs once per block; what is sequential is only this small head. While training the tokens before the
slots are known (`teacher_forced`), in decoding each is chosen before the next (`step`); both run one cell.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.draft_config import DraftConfig

State = Tensor | None


class SequentialHead(nn.Module):
    """From a slot's hidden state h and the embedding e of the token before it to a logit bias W2 f (rank r).

    markov: f = e. gated: f = sigmoid(G [h; e]) * e. rnn: [g, c, o] = J [s; e; h], s = sig(g) s + (1 - sig(g)) tanh(c),
    f = tanh(o), with s = 0 at the anchor. (DSpark; names of the tensors as in the Speculators format.)
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.kind, rank = config.sequential_head, config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def embed(self, previous: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings [..., r] of verifier token ids."""
        return self.markov_w1(previous).to(dtype)

    def bias(self, features: Tensor) -> Tensor:
        """Logit bias [..., Vd] of features [..., r]."""
        return self.markov_w2(features)

    def step(self, hidden_ND: Tensor, previous_N: Tensor, state: State) -> tuple[Tensor, State]:
        """Features [N, r] of one slot, and the state for the next; the first slot's state is None."""
        return self._cell(hidden_ND, self.embed(previous_N, hidden_ND.dtype), state)

    def teacher_forced(self, hidden_NKD: Tensor, previous_NK: Tensor) -> Tensor:
        """Features [N, K, r] of all slots, given the tokens before them."""
        embedded = self.embed(previous_NK, hidden_NKD.dtype)
        if self.kind != "rnn":
            return self._cell(hidden_NKD, embedded, None)[0]
        state: State = None
        features = []
        for slot in range(hidden_NKD.shape[1]):
            feature, state = self._cell(hidden_NKD[:, slot], embedded[:, slot], state)
            features.append(feature)
        return torch.stack(features, dim=1)

    def _cell(self, hidden: Tensor, embedded: Tensor, state: State) -> tuple[Tensor, State]:
        if self.kind == "markov":
            return embedded, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1))) * embedded, None
        before = torch.zeros_like(embedded) if state is None else state
        joint = self.joint_proj(torch.cat((before, embedded, hidden), dim=-1))
        gate, candidate, out = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(out), keep * before + (1 - keep) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """One logit a slot: the chance that its token is accepted if all before it are."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_previous = config.confidence_with_previous
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_previous else 0), 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """float32 logits [...] of hidden states [..., D] (and the embeddings [..., r] of the tokens before)."""
        if self.with_previous:
            assert embedded is not None
            hidden = torch.cat((hidden, embedded), dim=-1)
        return self.proj(hidden)[..., 0].float()
