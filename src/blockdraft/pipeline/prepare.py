"""`blockdraft convert`, `prepare` and `regenerate`: a verifier, prompts, and the verifier's own replies to them."""

from __future__ import annotations

from typing import Any

import torch

from blockdraft.data.prompts import prompt_lines, read_prompts
from blockdraft.data.workloads import workload_prompts
from blockdraft.decoding import regenerate as replies
from blockdraft.errors import InputError
from blockdraft.folders import write_text
from blockdraft.pipeline.loading import encode_all, verifier_of
from blockdraft.settings import ConvertSettings, PrepareSettings, RegenerateSettings
from blockdraft.verifiers.loading import is_gguf, load_verifier, save_folder


def convert(settings: ConvertSettings) -> dict[str, Any]:
    """Write a GGUF verifier as an ordinary folder."""
    if not is_gguf(settings.source):
        raise InputError("source", settings.source, "must be smollm2-135m-instruct or a .gguf file")
    if settings.save_path.exists():
        raise InputError("--save-path", settings.save_path, "exists already; choose a folder that does not")
    verifier = load_verifier(settings.source, torch.float32)
    save_folder(verifier, settings.save_path)
    return {
        "source": settings.source,
        "architecture": verifier.identity.architecture,
        "folder": str(settings.save_path),
    }


def prepare(settings: PrepareSettings) -> dict[str, Any]:
    """Write train.jsonl and heldout.jsonl."""
    train, heldout = workload_prompts(settings.workload)
    paths = {name: settings.save_path / f"{name}.jsonl" for name in ("train", "heldout")}
    write_text(paths["train"], prompt_lines(train))
    write_text(paths["heldout"], prompt_lines(heldout))
    return {
        "workload": settings.workload,
        "train": len(train),
        "heldout": len(heldout),
        "folder": str(settings.save_path),
    }


def regenerate(settings: RegenerateSettings) -> dict[str, Any]:
    """Decode a prompt file and write documents."""
    conversations = read_prompts(settings.data_path, "--data-path")
    verifier = verifier_of(settings)
    prompts = encode_all(verifier, conversations)
    documents = replies.regenerate(verifier, prompts, settings.max_new_tokens, settings.batch_size, settings.save_path)
    return {**replies.counts(documents), "folder": str(settings.save_path)}
