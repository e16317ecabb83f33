"""The plugin inside the engine's own classes, without starting an engine."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

from blockdraft import __version__
from blockdraft.checkpoints.store import save_draft
from conftest import contract_of, tiny_config, tiny_draft, tiny_verifier_of

pytestmark = pytest.mark.engine


# One process imports the engine; each test runs in a fork of it.
ENGINE = multiprocessing.get_context("forkserver")
ENGINE.set_forkserver_preload(
    [
        "vllm.transformers_utils.configs.speculators.base",
        "vllm.v1.sample.rejection_sampler",
        "vllm.v1.spec_decode.dflash",
    ]
)
IN_CHILD = """
import os, sys
for stream, path in ((1, {out!r}), (2, {err!r})):
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
sys.argv[1:] = {arguments!r}
"""


def in_child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, since the plugin changes the engine's classes for good."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = f"{folder}/out", f"{folder}/err"
        prelude = IN_CHILD.format(out=out, err=err, arguments=list(arguments))
        child = ENGINE.Process(target=exec, args=(prelude + textwrap.dedent(code), {}))
        child.start()
        child.join()
        said = Path(out).read_text(encoding="utf-8"), Path(err).read_text(encoding="utf-8")
        return subprocess.CompletedProcess(arguments, child.exitcode or 0, *said)


def test_it_is_found_by_entry_point_and_registers_and_says_so_once() -> None:
    done = in_child(
        """
        import functools
        from vllm.plugins import load_general_plugins
        from vllm.v1.spec_decode.dflash import DFlashProposer
        from vllm.transformers_utils.configs.speculators import algos, base
        load_general_plugins()
        names = ("__init__", "propose", "_sample_draft_tokens", "set_inputs_first_pass")
        first = [vars(DFlashProposer)[name] for name in names]
        built = vars(base.SpeculatorsConfig)["build_vllm_speculative_config"]
        assert all(isinstance(each, functools.partialmethod) for each in first)
        from blockdraft.vllm_plugin import register
        register.register(); register.register()
        again = [vars(DFlashProposer)[name] for name in names]
        assert all(a is b for a, b in zip(first, again))
        assert vars(base.SpeculatorsConfig)["build_vllm_speculative_config"] is built
        assert {"dflash", "dflare", "dspark", "blockdraft"} <= set(algos.SUPPORTED_SPECULATORS_TYPES)
        from vllm import ModelRegistry
        assert "BlockDraftModel" in ModelRegistry.get_supported_archs()
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging_if_needed
        configure_logging_if_needed(LoggingConfig())
        configure_logging_if_needed(LoggingConfig(log_level="DEBUG"))
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = (done.stdout + done.stderr).splitlines()
    assert sum(f"blockdraft {__version__} is active in vLLM 0.32" in line for line in said) == 1, said


def test_an_unknown_engine_is_refused_for_our_drafts_and_left_alone_for_others(tmp_path: Path) -> None:
    verifier = tiny_verifier_of("llama")
    draft = tiny_draft(verifier, tiny_config("dflash"))
    save_draft(tmp_path / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    done = in_child(
        """
        import json, sys
        import vllm
        vllm.__version__ = "0.77.0"
        from blockdraft.errors import InputError
        from blockdraft.vllm_plugin import register
        from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig
        register.register()
        ours = json.load(open(sys.argv[1]))
        others = {key: value for key, value in json.load(open(sys.argv[1])).items() if key != "blockdraft"}
        SpeculatorsConfig.extract_transformers_pre_trained_config(others)
        try:
            SpeculatorsConfig.extract_transformers_pre_trained_config(ours)
        except InputError as error:
            print(error)
        """,
        str(tmp_path / "draft" / "config.json"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith(
        "vllm: 0.77.0: this blockdraft serves through vLLM 0.32.*; install one of these"
    )


def test_a_checkpoint_that_contradicts_itself_is_refused_by_the_engine(tmp_path: Path) -> None:
    verifier = tiny_verifier_of("llama")
    draft = tiny_draft(verifier, tiny_config("dflash"))
    save_draft(tmp_path / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    config["mask_token_id"] += 1
    path.write_text(json.dumps(config))
    done = in_child(
        """
        import json, sys
        from blockdraft.vllm_plugin import register
        from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig
        register.register()
        SpeculatorsConfig.extract_transformers_pre_trained_config(json.load(open(sys.argv[1])))
        """,
        str(path),
    )
    assert done.returncode == 1 and "InputError: config.json mask_token_id" in done.stderr


def test_context_keys_are_normalised_by_their_own_layer() -> None:
    """The fault that is fixed: the engine's own kernel on CPUs uses the first layer's weights for all."""
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from vllm import _custom_ops as ops

    from blockdraft.vllm_plugin.draft_model import normalized_context_keys

    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 5, 2, 32, generator=generator)
    weights = 1 + 0.3 * torch.randn(3, 32, generator=generator)
    found = normalized_context_keys(SimpleNamespace(_rms_norm_eps=1e-6, _k_norm_weights=weights), keys)
    for layer in range(3):
        wanted = torch.nn.functional.rms_norm(keys[layer], (32,), weights[layer], 1e-6)
        torch.testing.assert_close(found[layer], wanted)
    assert found.is_contiguous()
    stock = torch.empty_like(keys)
    ops.rms_norm(stock, keys, weights, 1e-6)
    # When this fails, the engine's kernel has been fixed and the plugin's part can go.
    assert not torch.allclose(stock[1], found[1], atol=1e-3)


def test_a_temperature_reaches_every_token_of_its_request() -> None:
    """The other fault that is fixed: the engine's own kernel on CPUs loses values that are no integers."""
    pytest.importorskip("vllm")
    from blockdraft.vllm_plugin.sampling import repeated_for_tokens

    temperatures, cumulated = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 2, 5])
    found = repeated_for_tokens(temperatures, cumulated, 5, replace_from=0, replace_to=1)
    torch.testing.assert_close(found, torch.tensor([0.7, 0.7, 1.3, 1.3, 1.3]))
    found = repeated_for_tokens(torch.tensor([0.0, 0.5]), torch.tensor([1, 3]), 3, replace_from=0, replace_to=1)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.5, 0.5]))
    done = in_child(
        """
        import torch
        from vllm.v1.sample import rejection_sampler
        from vllm.utils import cpu_triton_utils
        output = torch.full((3,), 9.0)
        cpu_triton_utils._expand_kernel_impl(output, torch.tensor([0.7, 1.3]), torch.tensor([1, 3]), 0, 1)
        print(output.tolist())
        stock = rejection_sampler.expand_batch_to_tokens
        from blockdraft.vllm_plugin import register, sampling
        register.register()
        assert rejection_sampler.expand_batch_to_tokens is sampling.repeated_for_tokens is not stock
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # When this fails, the engine's kernel has been fixed and the plugin's part can go.
    assert done.stdout.strip().splitlines()[-1] == "[9.0, 9.0, 9.0]"


def test_a_step_without_proposed_tokens_is_sampled_from_nothing() -> None:
    """One request with `top_k` alone ended every server with a draft in the step of its prompt."""
    pytest.importorskip("vllm")
    done = in_child(
        """
        import types
        import torch
        from vllm.v1.sample import rejection_sampler
        from blockdraft.vllm_plugin import register, sampling

        rejection_sampler.expand_batch_to_tokens = sampling.repeated_for_tokens

        def constrained(rows):
            metadata = types.SimpleNamespace(
                all_greedy=False, temperature=torch.ones(1), top_k=torch.tensor([5]), top_p=None
            )
            logits = torch.arange(10.0 * rows).view(rows, 10)
            return rejection_sampler.apply_sampling_constraints(logits, torch.tensor([rows]), metadata)

        try:
            constrained(0)
        except (IndexError, RuntimeError) as error:
            print("stock:", type(error).__name__)
        register.register()
        print(tuple(constrained(0).shape), constrained(2).isfinite().sum(dim=1).tolist())
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # When the first line is gone, the engine has fixed it and the plugin's part can go.
    assert done.stdout.strip().splitlines()[-2:] == ["stock: RuntimeError", "(0, 10) [5, 5]"]


def test_bodies_that_trip_the_engines_own_checks_are_the_clients_mistakes() -> None:
    """The engine's server answered them with 500: a wrong type, half of a surrogate pair, ids to look up in a draft."""
    pytest.importorskip("vllm")
    done = in_child(
        """
        from fastapi import FastAPI
        from fastapi.testclient import TestClient
        from vllm import SamplingParams
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.exceptions import VLLMValidationError
        from blockdraft.vllm_plugin import register

        app = FastAPI()

        @app.post("/")
        def answer(body: CompletionRequest) -> str:
            return "read"

        def read(content):
            client = TestClient(app, raise_server_exceptions=False)
            return client.post("/", content=content, headers={"content-type": "application/json"}).status_code

        def checked():
            try:
                SamplingParams(logprobs=1, logprob_token_ids=[1])._validate_spec_decode(object())
            except AttributeError:
                return "AttributeError"
            except VLLMValidationError as error:  # any other is answered with 500
                return str(error)
            return "accepted"

        fields = ('"structured_outputs": [1]', '"stop": "\\\\ud800"', '"n": 1')
        bodies = ['{"prompt": "a", ' + field + "}" for field in fields]
        print([read(body) for body in bodies], checked())
        register.register()
        print([read(body) for body in bodies], checked())
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stock, ours = done.stdout.strip().splitlines()[-2:]
    # When the first of these fails, the engine has fixed it and the plugin's part can go.
    assert stock == "[500, 200, 200] accepted"  # the second fails further on
    assert ours == "[422, 422, 200] logprob_token_ids is not supported with speculative decoding"
