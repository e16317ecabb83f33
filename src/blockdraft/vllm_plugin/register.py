"""The vLLM plugin, found through the entry point `vllm.general_plugins` and run in every process of the engine.

It registers the draft family under the engine's method "dflash": checkpoints of type dflare, dspark (where the runner
has no dspark of its own) and custom ones load `draft_model.BlockDraftForCausalLM`; DFlash checkpoints stay with the
engine's own class. What the engine's proposer must do differently for them is wrapped around its methods, and errors of
the engine are patched for every draft (`_patch_context_key_norm`, `_keep_windows_apart`, `sampling`, `request_checks`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from blockdraft.checkpoints.speculators import CONTRACT_KEY, parse_config
from blockdraft.errors import InputError
from blockdraft.presets import CUSTOM, CUSTOM_ARCHITECTURE, PRESETS, vllm_method_of
from blockdraft.version import __version__
from blockdraft.vllm_plugin.facts import STATED, on_v1_runner
from blockdraft.vllm_plugin.request_checks import patch_requests
from blockdraft.vllm_plugin.sampling import patch_sampling
from blockdraft.vllm_plugin.servable import is_known, require_servable, unknown_engine
from blockdraft.vllm_plugin.support import PATCHED, T5GEMMA2

_DONE = "_blockdraft_plugin"
_ACTIVE = (
    f"blockdraft %s is active in vLLM %s; drafts: {', '.join((*PRESETS, CUSTOM))}; models: %s; patched: "
    "draft proposer, draft layers, sampling with a draft, request checks, prompts of encoder-decoder models"
)


def register() -> None:
    """Entry point. May be called any number of times in a process; the first call does the work."""
    import vllm
    from vllm.transformers_utils.configs.speculators import algos

    if getattr(algos, _DONE, False):
        return
    setattr(algos, _DONE, True)
    known = is_known(vllm.__version__)
    for method in (*PRESETS, CUSTOM):
        stock = algos.SUPPORTED_SPECULATORS_TYPES.get(method)
        update = functools.partial(_update, method, stock) if known else functools.partial(_reject, method, stock)
        algos.register_speculator(method)(update)
    _say_so(known)
    if not known:
        return
    _serve_as_dflash()
    vllm.ModelRegistry.register_model(CUSTOM_ARCHITECTURE, "blockdraft.vllm_plugin.draft_model:BlockDraftForCausalLM")
    _patch_context_key_norm()
    patch_sampling()
    patch_requests(on_v1_runner())
    _keep_windows_apart()
    _extend_proposer()
    _give_hidden_states()
    _serve_t5gemma2()


def _say_so(known: bool) -> None:
    """One line in the engine's log, once in every process that loads the plugin: what in it is not stock vLLM."""
    import vllm
    from vllm import logger as engine_log

    log = engine_log.init_logger("vllm.plugins.blockdraft")  # vLLM shows what is below its own name only

    def say() -> None:
        if known:
            log.info(_ACTIVE, __version__, vllm.__version__, ", ".join((CUSTOM_ARCHITECTURE, *PATCHED, T5GEMMA2)))
        else:
            log.warning("blockdraft %s does not know vLLM %s and rejects its own drafts", __version__, vllm.__version__)

    if log.hasHandlers():
        say()
        return
    configure = engine_log.configure_logging  # the server loads plugins before it has read how to log

    def then_say(config: Any) -> None:
        engine_log.configure_logging = configure
        configure(config)
        say()

    engine_log.configure_logging = then_say


def _update(
    method: str, stock: Callable[..., None] | None, config_dict: dict[str, Any], pre_trained_config: dict[str, Any]
) -> None:
    """Turn a checkpoint's config.json into the engine's draft config (in place, as the engine's own updaters do)."""
    from vllm.transformers_utils.configs.speculators import algos

    if CONTRACT_KEY not in config_dict:
        if stock is None:
            raise InputError("checkpoint config.json", f"type {method!r} without a contract", "export it by blockdraft")
        stock(config_dict=config_dict, pre_trained_config=pre_trained_config)
        return
    stated = copy.deepcopy(config_dict)  # the engine writes its draft config into the nested layer config
    require_servable(parse_config(stated, "config.json"), on_v1_runner())
    if stock is not None and _stays(method):
        stock(config_dict=config_dict, pre_trained_config=pre_trained_config)
    else:
        algos.update_dflash(config_dict=config_dict, pre_trained_config=pre_trained_config)
        pre_trained_config["architectures"] = [CUSTOM_ARCHITECTURE]
    pre_trained_config[STATED] = stated


def _stays(method: str) -> bool:
    """Whether drafts of a method are left to the engine's own class: all that it has one for, DFlash alone on V1."""
    return vllm_method_of(method) == "dflash" or (vllm_method_of(method) is not None and not on_v1_runner())


def _reject(
    method: str, stock: Callable[..., None] | None, config_dict: dict[str, Any], pre_trained_config: dict[str, Any]
) -> None:
    """In an engine that this plugin does not know: leave others' drafts alone, reject ours."""
    import vllm

    if CONTRACT_KEY in config_dict or stock is None:
        raise unknown_engine(vllm.__version__)
    stock(config_dict=config_dict, pre_trained_config=pre_trained_config)


def _serve_as_dflash() -> None:
    """Let the engine run our types under its method "dflash", as it does with its own dflash2."""
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    stock = SpeculatorsConfig.build_vllm_speculative_config

    def build(cls: type, config_dict: dict[str, Any]) -> dict[str, Any]:
        result = stock(config_dict=config_dict)
        if result["method"] in (*PRESETS, CUSTOM) and not _stays(result["method"]):
            result["method"] = "dflash"
        return result

    SpeculatorsConfig.build_vllm_speculative_config = classmethod(build)


def _patch_context_key_norm() -> None:
    """vLLM 0.32's rms_norm on CPUs takes a weight of two dimensions and uses its first row for every layer.

    All draft layers but the first would normalize their context keys wrongly: the text stays right, acceptance falls.
    """
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.platforms import current_platform

    from blockdraft.vllm_plugin.draft_model import normalized_context_keys

    if current_platform.is_cpu():
        DFlashQwen3Model._normalize_context_k = normalized_context_keys


def _keep_windows_apart() -> None:
    """vLLM 0.32 gives a layer without a window that of the cache: the verifier's, where all its layers slide.

    A draft that sees the whole context would be served with the verifier's window: the text stays right, proposals go
    wrong past it. Such layers are built as if the cache had none.
    """
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3DecoderLayer

    build = DFlashQwen3DecoderLayer.__init__

    @functools.wraps(build)
    def with_its_own(self: Any, *args: Any, cache_config: Any = None, **kwargs: Any) -> None:
        window = getattr(cache_config, "sliding_window", None)
        if window is not None:
            cache_config.sliding_window = None
        try:
            build(self, *args, cache_config=cache_config, **kwargs)
        finally:
            if window is not None:
                cache_config.sliding_window = window

    DFlashQwen3DecoderLayer.__init__ = with_its_own


def _extend_proposer() -> None:
    """Teach the engine's DFlash proposer blocks that sample from the anchor, sequential heads, and to keep a record."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    from blockdraft.vllm_plugin import proposer

    for name, wrapper in (
        ("__init__", proposer.init),
        ("set_inputs_first_pass", proposer.set_inputs_first_pass),
        ("_sample_draft_tokens", proposer.sample_draft_tokens),
        ("propose", proposer.propose),
        ("validate_same_kv_cache_group", proposer.validate_same_kv_cache_group),
    ):
        setattr(DFlashProposer, name, functools.partialmethod(wrapper, getattr(DFlashProposer, name)))


def _give_hidden_states() -> None:
    """Register the families that give no hidden states in vLLM 0.32; each is patched when the engine asks for it."""
    import vllm

    for architecture in PATCHED:
        vllm.ModelRegistry.register_model(architecture, f"blockdraft.vllm_plugin.hidden_states:{architecture}")


def _serve_t5gemma2() -> None:
    """Make T5Gemma 2 a model of the engine: plain prompts go to its encoder, whose outputs meet their own rows."""
    import vllm
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from blockdraft.vllm_plugin.t5gemma2 import hooks

    vllm.ModelRegistry.register_model(
        T5GEMMA2, "blockdraft.vllm_plugin.t5gemma2.model:T5Gemma2ForConditionalGeneration"
    )
    for owner, name, wrapper in (
        (BaseRenderer, "process_for_engine", hooks.process_prompt),
        (BaseRenderer, "process_for_engine_async", hooks.process_prompt_async),
        (BaseRenderer, "get_dec_start_token_id", hooks.decoder_start_token),
        (GPUModelRunner, "_execute_mm_encoder", hooks.execute_encoder),
    ):
        setattr(owner, name, functools.partialmethod(wrapper, getattr(owner, name)))
