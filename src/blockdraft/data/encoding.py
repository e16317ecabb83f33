"""Stored conversations to rows of token ids, a batch at a time; what `datasets` maps in several processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from blockdraft.data.conversations import Conversation, RowError
from blockdraft.data.table import flat
from blockdraft.data.templates import ChatTemplate, Encoded, Result, truncated

FEATURES = {
    "row": "int64", "reason": "string", "detail": "string", "source_ids": ["int32"], "input_ids": ["int32"],
    "targets": ["int32"], "finish": "string", "cut_source": "int32", "cut": "int32", "hidden": "int32",
    "no_reasoning": "int32",
}  # fmt: skip


@dataclass(frozen=True)
class Encoder:
    """Encodes conversations within limits.

    Attributes:
        max_source: longest source, of verifiers with an encoder.
        max_length: longest text.
        drop_overlong: reject what is longer, instead of cutting it.
        requests_only: replies are still to be written.
        image_ids: tokens that stand for images, of which there are none.
    """

    template: ChatTemplate
    max_source: int
    max_length: int
    drop_overlong: bool = False
    requests_only: bool = False
    image_ids: frozenset[int] = frozenset()

    def __call__(self, batch: dict[str, list[Any]], rows: list[int]) -> dict[str, list[Any]]:
        """Texts of stored conversations, one or several for each; a row with a reason for what cannot be used."""
        results = self._results(batch)
        found: dict[str, list[Any]] = {name: [] for name in FEATURES}
        for row, result in zip(rows, results, strict=True):
            for values in self._rows(row, result):
                for name, value in values.items():
                    found[name].append(value)
        return found

    def _results(self, batch: dict[str, list[Any]]) -> list[Result | RowError]:
        texts = [Conversation.from_json(text) for text in batch["conversation"] if text is not None]
        encode = self.template.encode_requests if self.requests_only else self.template.encode
        encoded = iter(encode(texts))
        return [
            next(encoded) if text is not None else self._checked(json.loads(tokens))
            for text, tokens in zip(batch["conversation"], batch["tokens"], strict=True)
        ]

    def _checked(self, facts: dict[str, Any]) -> Result | RowError:
        try:
            return self._ready(facts)
        except RowError as error:
            return error

    def _ready(self, facts: dict[str, Any]) -> Result:
        if self.requests_only:
            raise RowError("token ids without a conversation", "the verifier cannot write their replies anew")
        if (facts["source_ids"] is None) != (self.template.start_id is None):
            raise RowError("not for this kind of verifier", "source_ids belong to an encoder")
        self._require_text(facts["source_ids"] or facts["input_ids"])
        largest = max([*facts["input_ids"], *(facts["source_ids"] or [])])
        if largest >= len(self.template.tokenizer):
            raise RowError("token outside of the vocabulary", str(largest))
        spans = tuple((start, end) for start, end in facts["targets"])
        ends = facts["input_ids"][spans[-1][1] - 1] in self.template.stop_ids
        finish = "stop" if ends else "length"
        return Result([Encoded(facts["input_ids"], spans, facts["source_ids"], finish)])

    def _require_text(self, ids: list[int]) -> None:
        if found := self.image_ids.intersection(ids):
            raise RowError("image tokens in the text", str(sorted(found)))

    def _rows(self, row: int, result: Result | RowError) -> list[dict[str, Any]]:
        if isinstance(result, RowError):
            return [_rejected(row, result)]
        rows = []
        try:
            for number, text in enumerate(result.texts):
                self._require_text(text.source_ids or text.input_ids)
                kept, cut_source, cut = truncated(text, self.max_source, self.max_length)
                if self.requests_only and cut:
                    raise RowError("prompt over the limit", f"{len(text.input_ids)} tokens")
                if self.drop_overlong and (cut or cut_source):
                    raise RowError("over the limit", f"{cut or cut_source} tokens too long")
                rows.append(
                    {
                        "row": row, "reason": None, "detail": None, "source_ids": kept.source_ids,
                        "input_ids": kept.input_ids, "targets": flat(kept.targets), "finish": kept.finish,
                        "cut_source": cut_source, "cut": cut, "hidden": 0 if number else result.hidden,
                        "no_reasoning": 0 if number else result.no_reasoning,
                    }
                )  # fmt: skip
        except RowError as error:
            return [_rejected(row, error)]
        return rows


def _rejected(row: int, error: RowError) -> dict[str, Any]:
    return {
        "row": row, "reason": error.reason, "detail": error.detail, "source_ids": None, "input_ids": [],
        "targets": [], "finish": "", "cut_source": 0, "cut": 0, "hidden": 0,
        "no_reasoning": 0,
    }  # fmt: skip
