"""What is wrapped around methods of vLLM 0.32 for models with an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from blockdraft.vllm_plugin.t5gemma2.prompts import SourceProcessor, with_source, with_text

Stock = Callable[..., Any]


def process_prompt(renderer: Any, stock: Stock, prompt: Any, arrival_time: float, **kwargs: Any) -> Any:
    """Around the renderer's `process_for_engine`."""
    given = with_source(renderer, prompt)
    return with_text(stock(renderer, given, arrival_time, **kwargs), given)


async def process_prompt_async(renderer: Any, stock: Stock, prompt: Any, arrival_time: float, **kwargs: Any) -> Any:
    """Around its asynchronous variant."""
    given = with_source(renderer, prompt)
    return with_text(await stock(renderer, given, arrival_time, **kwargs), given)


def decoder_start_token(renderer: Any, stock: Stock) -> int:
    """Around the renderer's `get_dec_start_token_id`, which would look for the tokenizer's BOS and fail without one.

    The decoder's prompt is made by our CPU, with the start token that the in-process verifier has too.
    """
    processor = renderer.mm_processor
    return processor.info.decoder_start() if isinstance(processor, SourceProcessor) else stock(renderer)


def execute_encoder(runner: Any, stock: Stock, scheduler_output: Any) -> list[Tensor]:
    """Around the runner's `_execute_mm_encoder`: its outputs in the order of the batch's rows.

    The engine has them in the scheduler's order, while their slots in the cache are in that of the rows. The two differ
    when a request that was preempted comes back in the step in which a new one begins.
    """
    outputs: list[Tensor] = stock(runner, scheduler_output)
    if not runner.model_config.is_encoder_decoder:
        return outputs
    rows = [runner.input_batch.req_id_to_index[request] for request in scheduler_output.scheduled_encoder_inputs]
    return [output for _, output in sorted(zip(rows, outputs, strict=True), key=lambda pair: pair[0])]
