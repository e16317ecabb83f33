"""On-policy data: the verifier's own greedy replies to prompts.

Prompts are decoded in fixed batches (longest first), and every finished batch is put on disk at once. A killed run
goes on with the first batch that is missing; since batches are fixed, the result is the same as without the kill.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockdraft.decoding.engine import DecodingEngine
from blockdraft.fingerprint import already_made
from blockdraft.folders import write_json, write_text
from blockdraft.progress import progress
from blockdraft.records import Document, document_lines, read_documents
from blockdraft.runtime import dtype_name
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.base import Verifier

DOCUMENTS, RECORD = "documents.jsonl", "data_config.json"
_PARTIAL = ".documents.partial.jsonl"


def regenerate(
    verifier: Verifier, prompts: Sequence[list[int]], max_new_tokens: int, batch_size: int, folder: Path
) -> list[Document]:
    """Greedy replies to prompts (token ids), written to `folder` with a record of how they were made.

    A folder that holds the result of the same request is read, one of another request is refused.
    """
    digest = hashlib.sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
    facts = {
        "verifier": {name: getattr(verifier.identity, name) for name in verifier.identity.COMPARED},
        "dtype": dtype_name(verifier.dtype),
        "prompts": digest,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
    }
    if already_made(folder / RECORD, facts, "--save-path"):
        return read_documents(folder / DOCUMENTS, "--save-path")
    folder.mkdir(parents=True, exist_ok=True)
    documents = _decode(verifier, prompts, max_new_tokens, batch_size, folder / f"{_PARTIAL}.{digest}")
    write_text(folder / DOCUMENTS, document_lines(documents))
    write_json(folder / RECORD, {"facts": facts, "verifier": asdict(verifier.identity), "counts": counts(documents)})
    for partial in folder.glob(f"{_PARTIAL}*"):
        partial.unlink()
    return documents


def counts(documents: Sequence[Document]) -> dict[str, Any]:
    """How many documents and tokens there are, and how the replies ended."""
    return {
        "documents": len(documents),
        "prompt_tokens": sum(document.first_target for document in documents),
        "reply_tokens": sum(len(document.learned) for document in documents),
        "finish": dict(Counter(document.finish for document in documents)),
    }


def _decode(
    verifier: Verifier, prompts: Sequence[list[int]], max_new_tokens: int, batch_size: int, partial: Path
) -> list[Document]:
    engine = DecodingEngine(verifier, None, 0, SamplingSettings(max_new_tokens=max_new_tokens))
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    done = {document.id: document for document in _whole_lines(partial)}
    finished = len(done) // batch_size * batch_size if len(done) < len(prompts) else len(prompts)
    with progress("replies", len(prompts), finished) as advance:
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            if all(str(index) in done for index in batch):
                continue
            replies = engine.generate([prompts[index] for index in batch], batch_size, on_done=advance)
            fresh = [reply.document(str(index)) for index, reply in zip(batch, replies, strict=True)]
            done.update((document.id, document) for document in fresh)
            with partial.open("a", encoding="utf-8") as handle:
                handle.write(document_lines(fresh))
                handle.flush()
                os.fsync(handle.fileno())
    return [done[str(index)] for index in range(len(prompts))]


def _whole_lines(partial: Path) -> list[Document]:
    """Documents of a killed run; a line cut short by the kill is dropped from the file."""
    if not partial.is_file():
        return []
    text = partial.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    write_text(partial, whole)
    return read_documents(partial, "--save-path") if whole else []
