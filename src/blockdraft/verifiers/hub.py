"""Names of verifiers: a folder, a GGUF file or a hub id, and what is said where one cannot be read."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from blockdraft.errors import InputError

FIELD = "--verifier-name-or-path"
EMBEDDED = "smollm2-135m-instruct"  # the verifier that a package ships, as a GGUF file


def is_gguf(name_or_path: str) -> bool:
    """Whether a name stands for a GGUF file, which vLLM and transformers do not take as it is."""
    return name_or_path == EMBEDDED or name_or_path.endswith(".gguf")


def require_hub_id(name: str, revision: str | None) -> None:
    """Reject a revision of what has none.

    Raises:
        InputError: the name is that of a folder or file on this machine.
    """
    if revision is not None and (is_gguf(name) or Path(name).exists()):
        raise InputError("--revision", revision, f"belongs to a hub id, and {name} is none; leave it out")


def commit_of(name: str, revision: str | None) -> str | None:
    """The commit that a branch or tag of a hub id stands for, once its config was read; None for what is no hub id."""
    if is_gguf(name) or Path(name).exists():
        return None
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent.name if isinstance(config, str) else None


def unreadable(name: str, error: Exception, what: str = "cannot be read") -> InputError:
    """The one line for whatever the hub's client, the readers or a model's own code raised."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if "trust_remote_code" in str(error):
        return InputError(FIELD, name, "needs code that comes with it; if you trust it, pass --trust-remote-code")
    if isinstance(error, OSError) and not Path(name).exists():
        what = "not a local folder and could not be downloaded"
    return InputError(FIELD, name, f"{what} ({line})")
