"""Sampled text of vLLM with a draft follows the verifier's own distribution, by chi-square.

A random verifier of 128 tokens, whose distributions can be summed over every first token, in place of a real one.
"""

from __future__ import annotations

import pytest
import torch

from blockdraft.checkpoints.store import save_draft
from blockdraft.ops.sampling import sampling_probs
from blockdraft.serving.launcher import engine_environment
from blockdraft.serving.offline import DETAILED, Decoded, Request, decode
from blockdraft.verifiers.causal import CausalVerifier
from conftest import VOCAB, contract_of, tiny_config, tiny_draft
from serving.fixtures import HEAD_DIM, random_llama

pytestmark = pytest.mark.engine

DRAWS, TEMPERATURE, PROMPT = 4000, 2.0, list(range(5, 25))


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> CausalVerifier:
    return random_llama(tmp_path_factory.mktemp("tiny") / "verifier", VOCAB)


def next_token(verifier: CausalVerifier) -> torch.Tensor:
    """Distributions behind the prompt (row 0) and behind the prompt and each token (rows 1 to V), float64."""
    prompt = torch.tensor(PROMPT)
    texts = [prompt, *torch.cat([prompt.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], dim=1)]
    finals = torch.stack([states.final[-1] for states in verifier.states(texts, [])])
    return sampling_probs(verifier.logits(finals), TEMPERATURE, 0, 1.0).double()


def second_token(verifier: CausalVerifier) -> torch.Tensor:
    """The mixture over all first tokens."""
    probs = next_token(verifier)
    return probs[0] @ probs[1:]


@pytest.fixture(scope="module")
def sampled(verifier: CausalVerifier, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoded]:
    """Three tokens of 4,000 requests: a plain DFlash draft, and a DSpark draft that samples its proposals."""
    root = tmp_path_factory.mktemp("drafts")
    requests = []
    likely = second_token(verifier).topk(12).indices.sort().values  # what this draft can say: else little is accepted
    for method, k, more in (("dflash", 2, {}), ("dspark", 2, {"draft_sample_method": "probabilistic"})):
        draft = tiny_draft(verifier, tiny_config(method, head_dim=HEAD_DIM, draft_vocab_size=len(likely)))
        draft.vocabulary.keep(likely)
        draft.share(verifier.embed, verifier.head_VE)
        save_draft(root / method, draft, contract_of(draft, verifier), torch.float32, {})
        speculative = {"model": str(root / method), "method": "dflash", "num_speculative_tokens": k, **more}
        requests.append(
            Request(
                verifier=verifier.identity.name, prompts=[PROMPT] * DRAWS, stop_ids=[], max_tokens=[3] * DRAWS,
                dtype="float32", max_num_seqs=256, max_model_len=128, speculative=speculative,
                engine={"enforce_eager": True, "seed": 11, **DETAILED},
                sampling={"temperature": TEMPERATURE, "ignore_eos": True},
            )
        )  # fmt: skip
    found = decode(requests, engine_environment(0, cpu=True, v1_runner=True))
    return dict(zip(("dflash", "dspark"), found, strict=True))


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_sampled_text_follows_the_verifier_by_chi_square(
    sampled: dict[str, Decoded], verifier: CausalVerifier, method: str
) -> None:
    """The first token against the verifier's distribution, the second against its mixture over all first tokens."""
    tokens = torch.tensor([reply.tokens for reply in sampled[method].replies])
    assert tokens.shape == (DRAWS, 3)
    for seen, wanted in ((tokens[:, 0], next_token(verifier)[0]), (tokens[:, 1], second_token(verifier))):
        expected = DRAWS * wanted
        frequent = expected >= 5
        observed = seen.bincount(minlength=VOCAB)
        statistic = float(((observed - expected) ** 2 / expected)[frequent].sum())
        count = int(frequent.sum())
        assert count > 50
        assert statistic < count + 4 * (2 * count) ** 0.5
    counters = sampled[method].counters
    assert 0.005 < counters["accepted"] / counters["proposed"] < 0.98  # both branches of the rejection were taken
