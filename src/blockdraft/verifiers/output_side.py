"""The end of a verifier: its final norm, the output head, and what is read off its config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.ops.head import head_logits
from blockdraft.verifiers.architecture import layer_shape, logit_scale_of, rope_parameters, window_of
from blockdraft.verifiers.base import LayerShape
from blockdraft.verifiers.identity import softcap_of

GREEDY_ROWS = 128  # positions whose logits exist at once when only the most likely token is wanted


class OutputSide:
    """What verifiers share from the last layer on, whether their layers are there or not.

    Args:
        config: of the text model.
        final_norm: transformers' own module, with its weights.
        head_VE: rows of the output head.
    """

    def __init__(self, config: Any, final_norm: nn.Module, head_VE: Tensor) -> None:
        self._config, self._final_norm, self.head_VE = config, final_norm, head_VE
        self.logit_softcap: float | None = softcap_of(config)
        self._logit_scale = logit_scale_of(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.head_VE.dtype

    @property
    def device(self) -> torch.device:
        return self.head_VE.device

    @property
    def window(self) -> int | None:
        """Positions that sliding layers see. Read where it is needed, since a proof shortens it."""
        return window_of(self._config)

    def layer_shape(self) -> LayerShape:
        return layer_shape(self._config)

    def rope_parameters(self) -> dict[str, Any]:
        return rope_parameters(self._config)

    def scaled(self, final: Tensor) -> Tensor:
        """States behind the final norm as the output head wants them: with the family's scale of logits."""
        return final if self._logit_scale == 1 else final * self._logit_scale

    @torch.no_grad()
    def normed(self, raw: Tensor) -> Tensor:
        return self.scaled(self._final_norm(raw))

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        logits = head_logits(final, self.head_VE).float()
        return logits if self.logit_softcap is None else self.logit_softcap * torch.tanh(logits / self.logit_softcap)

    @torch.no_grad()
    def greedy(self, final_TE: Tensor) -> Tensor:
        parts = [self.logits(part).argmax(dim=-1) for part in final_TE.split(GREEDY_ROWS)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=self.device)
