"""Checks of files and tensors. Values are read in pieces, so that a large draft fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blockdraft.checkpoints.examine.facts import CheckpointFacts
from blockdraft.checkpoints.examine.finding import Findings, Statement, agree, error, warning
from blockdraft.checkpoints.store import CONFIG, read_checkpoint
from blockdraft.errors import InputError

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_PIECE = 2**24  # elements read at once
_MOST_LAYERS = 512  # a damaged config may state any number, which the check `depth` reports
_FROZEN = ("lm_head.weight", "embed_tokens.weight")  # the verifier's, whose padded rows may be zero
_VERIFIERS = ("verifier_lm_head.weight", "verifier_norm.weight")


def files(facts: CheckpointFacts) -> Findings:
    """Every file is there and whole, and the index names what the files hold."""
    for name, damage in sorted(facts.damage.items()):
        yield error(name, damage, "copy or export the checkpoint again")
    if facts.indexed and not any(name.endswith(".safetensors") for name in facts.damage):
        for name in sorted(facts.indexed.keys() ^ facts.tensors.keys()):
            problem = "missing" if name in facts.indexed else "not in the index"
            yield error(f"tensor {name}", problem, "index and files differ; readers would leave it out")
    weights = {path.suffix for path in facts.folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")}
    if weights and not facts.tensors:
        yield error("weights", ", ".join(sorted(weights)), "pickled weights can run code; convert to safetensors")


def contract(facts: CheckpointFacts) -> Findings:
    """Our own layout: config, contract, weights and their digest agree exactly."""
    if not facts.own:
        return
    try:
        read_checkpoint(facts.folder)
    except InputError as found:
        yield error(found.field, found.value, found.hint)


def tensor_names(facts: CheckpointFacts) -> Findings:
    """No tensor is missing, none is left over. (Our own layout: the check `contract` is exact.)"""
    if facts.own or not facts.tensors:
        return
    layers = min(facts.number_of_layers or 0, _MOST_LAYERS)
    parts = ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    needed = {"norm.weight", "hidden_norm.weight"}
    needed |= {f"layers.{layer}.{part}.weight" for layer in range(layers) for part in parts}
    fused = any("qkv_proj" in name for name in facts.tensors)
    if not fused:
        needed |= {f"layers.{i}.self_attn.{part}_proj.weight" for i in range(layers) for part in "qkv"}
    for name in sorted(needed - facts.tensors.keys()):
        yield error(f"tensor {name}", "missing", f"{CONFIG} describes a draft that has it")
    for name in _VERIFIERS:
        if name in facts.tensors:
            yield warning(f"tensor {name}", "stored", "is the verifier's and never read; leave it out")
    if "mask_hidden" in facts.tensors:
        yield error("tensor mask_hidden", "stored", "vLLM stops at a tensor of this name")


def shapes(facts: CheckpointFacts) -> Findings:
    """Tensors have the shapes that the config gives them."""
    layers = facts.layers
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    sizes = [layers.get(name) for name in names]
    if sizes[3] is None and isinstance(sizes[0], int) and isinstance(sizes[1], int) and sizes[1]:
        sizes[3] = sizes[0] // sizes[1]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        yield error(
            f"{CONFIG} {names[next(i for i, size in enumerate(sizes) if not isinstance(size, int))]}", "missing",
            "the layers cannot be built without it",
        )  # fmt: skip
        return
    hidden, heads, pairs, width, inner = known
    if pairs < 1 or heads % pairs:
        yield error(f"{CONFIG} num_key_value_heads", pairs, f"must divide the {heads} query heads")
    wanted = {
        "q_proj": (heads * width, hidden), "o_proj": (hidden, heads * width),
        "k_proj": (pairs * width, hidden), "v_proj": (pairs * width, hidden),
        "k_proj_target": (pairs * width, hidden), "v_proj_target": (pairs * width, hidden),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
        "q_norm": (width,), "k_norm": (width,), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    for name, stored in facts.tensors.items():
        if name.startswith("layers.") and name.endswith(".weight"):
            shape = wanted.get(name.split(".")[-2])
            if shape is not None and stored.shape != shape:
                yield error(f"tensor {name}", list(stored.shape), f"{CONFIG} makes it {list(shape)}")
    for name in ("norm.weight", "hidden_norm.weight"):
        found = facts.shape(name)
        if found is not None and found != (hidden,):
            yield error(f"tensor {name}", list(found), f"{CONFIG} makes it [{hidden}]")


def dtype(facts: CheckpointFacts) -> Findings:
    """The config names the dtype that the tensors have."""
    names = ("dtype", "torch_dtype")
    statements = [Statement(f"{CONFIG} {name}", facts.config.get(name)) for name in names]
    if facts.layers is not facts.config:
        statements += [Statement(f"{CONFIG} transformer_layer_config {n}", facts.layers.get(n)) for n in names]
    stored = {_DTYPES.get(t.dtype, t.dtype) for name, t in facts.tensors.items() if name not in ("d2t", "t2d")}
    floats = stored & set(_DTYPES.values())
    if len(floats) == 1:
        statements.append(Statement("dtype of the tensors", next(iter(floats))))
    elif len(floats) > 1:
        yield warning("tensors", ", ".join(sorted(floats)), "several dtypes; engines convert all to one")
    yield from agree(statements, "readers convert weights to what they believe first")


@dataclass
class _Extremes:
    finite: bool = True
    least: float = float("inf")
    most: float = float("-inf")


def numbers(facts: CheckpointFacts) -> Findings:
    """No tensor holds NaN or an infinity, and none of the layers' matrices is dead (one value everywhere)."""
    for name in sorted(facts.tensors):
        stored = facts.tensors[name]
        if not stored.dtype.startswith(("F", "BF")) or 0 in stored.shape:
            continue
        try:
            found = _extremes(facts, name)
        except (SafetensorError, OSError) as problem:
            yield error(f"tensor {name}", "cannot be read", str(problem))
            continue
        if not found.finite:
            yield error(f"tensor {name}", "NaN or infinity", "every logit becomes one; the run diverged, take another")
        elif found.least == found.most and name not in _FROZEN and len(stored.shape) > 1:
            layer = name.startswith("layers.") or name == "fc.weight"
            hint = "a matrix of one value passes nothing on; was it ever trained or loaded?"
            yield (error if layer else warning)(f"tensor {name}", f"{found.least:g} everywhere", hint)


def _extremes(facts: CheckpointFacts, name: str) -> _Extremes:
    found = _Extremes()
    for piece in _pieces(facts, name):
        values = piece.float()
        if not bool(values.isfinite().all()):
            return _Extremes(finite=False)
        low, high = torch.aminmax(values)
        found = _Extremes(True, min(found.least, float(low)), max(found.most, float(high)))
    return found


def _pieces(facts: CheckpointFacts, name: str) -> Iterator[Tensor]:
    stored = facts.tensors[name]
    with safe_open(facts.folder / stored.file, "pt") as file:
        if not stored.shape:
            yield file.get_tensor(name)
            return
        part = file.get_slice(name)
        rows = max(1, _PIECE // max(1, torch.Size(stored.shape[1:]).numel()))
        for start in range(0, stored.shape[0], rows):
            yield part[start : start + rows]
