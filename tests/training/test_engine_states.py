"""Servers of hidden states that fail: whatever they answer, nothing wrong is trained on and nothing is lost."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.errors import BlockdraftError, InputError, StoppedError
from blockdraft.settings import TrainSettings
from blockdraft.training import engine_states
from blockdraft.training.engine_states import EngineStates, Patience
from blockdraft.training.hidden_states import InProcess, TrainingStates
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.run_folder import LAST
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.causal import CausalVerifier
from conftest import random_example, tiny_encoder_decoder, tiny_verifier_of
from training.states_server import Change, StatesServer

EXAMPLES = [random_example(24 + i % 5, 6 + i % 3, i) for i in range(12)]
TAPS = (0, 2, 3)
IDS = (*TAPS, 4)


@pytest.fixture
def server(tiny_verifier: CausalVerifier, tmp_path: Path) -> Iterator[StatesServer]:
    with StatesServer(tiny_verifier, tmp_path / "states", IDS).running() as found:
        yield found


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_states, "_LONGEST_PAUSE", 0.05)


def provider_of(verifier: CausalVerifier, *urls: str, **patience: float) -> EngineStates:
    return EngineStates(urls, verifier, TAPS, True, Patience(**{"retries": 3, "timeout": 5.0, **patience}))  # type: ignore[arg-type]


def require_right(provider: EngineStates, verifier: CausalVerifier) -> None:
    for found, wanted in zip(provider.get(EXAMPLES), InProcess(verifier, TAPS, True).get(EXAMPLES), strict=True):
        torch.testing.assert_close(found.taps, wanted.taps, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.final, wanted.final, rtol=1e-5, atol=1e-5)
        assert torch.equal(found.greedy, wanted.greedy)


def test_states_come_at_once_and_leave_nothing_behind(server: StatesServer, tiny_verifier: CausalVerifier) -> None:
    provider = provider_of(tiny_verifier, server.url, workers=4)
    assert provider.available(EXAMPLES) is EXAMPLES
    require_right(provider, tiny_verifier)
    assert 1 < server.most_at_once <= 4 and not list(server.folder.iterdir())


# --- wrong answers ----------------------------------------------------------------------------------------------


def nan(tensors: dict[str, Any], *_: Any) -> None:
    tensors["hidden_states"][1, 0, 3] = torch.nan


def short(tensors: dict[str, Any], *_: Any) -> None:
    tensors["hidden_states"] = tensors["hidden_states"][2:].clone()


def others(tensors: dict[str, Any], *_: Any) -> None:
    tensors["token_ids"] = tensors["token_ids"] + 1


def half(tensors: dict[str, Any], answer: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save

    content = save(tensors)
    path.write_bytes(content[: len(content) // 2])


def bfloat16(tensors: dict[str, Any], *_: Any) -> None:
    tensors["hidden_states"] = tensors["hidden_states"].bfloat16()


def fewer(tensors: dict[str, Any], *_: Any) -> None:
    tensors["hidden_states"] = tensors["hidden_states"][:, 1:].clone()


def scaled(tensors: dict[str, Any], *_: Any) -> None:
    tensors["hidden_states"][-1, -1] = -tensors["hidden_states"][-1, -1]


def plain(tensors: dict[str, Any], answer: dict[str, Any], path: Path) -> None:
    del answer["kv_transfer_params"]


def stated(tensors: dict[str, Any], answer: dict[str, Any], path: Path) -> None:
    answer["kv_transfer_params"]["layer_ids"] = [1, 2, 3, 4]


def elsewhere(tensors: dict[str, Any], answer: dict[str, Any], path: Path) -> None:
    answer["kv_transfer_params"]["hidden_states_path"] = "/nowhere/x.safetensors"


WRONG: dict[str, tuple[Change, str]] = {
    "NaN": (nan, "its states hold numbers that are not finite"),
    "wrong length": (short, "; start it with --no-enable-prefix-caching"),
    "other tokens": (others, "its states are of other tokens"),
    "half a file": (half, "its file is damaged"),
    "another dtype": (bfloat16, "its states are bfloat16, and training is in float32; give both the same --dtype"),
    "fewer layers": (fewer, r"its states are \[24, 3, 32\], not \[24, 4, 32\]"),
    "other weights": (scaled, "it serves another model, or other weights"),
    "no states": (plain, "it gives no hidden states; start it with blockdraft serve --extract"),
    "other layers": (stated, r"it gives layers \[1, 2, 3, 4\], not \[0\]; start it with --target-layer-ids 0 2 3"),
    "a disk of its own": (elsewhere, "it writes to /nowhere, which is not here"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_found_before_work_and_in_the_middle(
    server: StatesServer, tiny_verifier: CausalVerifier, kind: str
) -> None:
    change, says = WRONG[kind]
    server.change = change
    provider = provider_of(tiny_verifier, server.url)
    with pytest.raises(InputError, match=f"--vllm-endpoint: {server.url}: .*{says}"):
        provider.available(EXAMPLES)
    with pytest.raises(BlockdraftError, match=rf"hidden states of example doc0: .*{says}.*after 3 tries"):
        provider.get(EXAMPLES[:1])
    first = len(server.asked)
    server.change = lambda *given: change(*given) if len(server.asked) == first + 1 else None  # once
    require_right(provider, tiny_verifier)


def test_a_server_of_an_encoder_decoder_is_none(tiny_verifier: CausalVerifier) -> None:
    with pytest.raises(InputError, match="no hidden states of encoder-decoder verifiers"):
        EngineStates(["http://127.0.0.1:1"], tiny_encoder_decoder(), TAPS)


# --- servers that go and come back ------------------------------------------------------------------------------


def test_no_server_is_one_line(tiny_verifier: CausalVerifier) -> None:
    with pytest.raises(InputError, match=r"--vllm-endpoint: http://127\.0\.0\.1:1 .*no server answers; start one"):
        provider_of(tiny_verifier, "http://127.0.0.1:1").available(EXAMPLES)


def test_a_dead_server_is_left_out_and_asked_again(
    tiny_verifier: CausalVerifier, tmp_path: Path, said: Callable[[], str]
) -> None:
    second = StatesServer(tiny_verifier, tmp_path / "b", IDS)
    with second.running():
        port = int(second.url.rsplit(":", 1)[1])
    with StatesServer(tiny_verifier, tmp_path / "a", IDS).running() as first:
        provider = provider_of(tiny_verifier, first.url, second.url)
        provider.available(EXAMPLES)
        assert f"no answer from {second.url}" in said()
        require_right(provider, tiny_verifier)
        assert not second.asked
        with second.running(port):
            while not second.asked:
                require_right(provider, tiny_verifier)


@pytest.mark.parametrize("how", ["gone", "failing"])
def test_a_server_that_comes_back_is_waited_for(tiny_verifier: CausalVerifier, tmp_path: Path, how: str) -> None:
    server = StatesServer(tiny_verifier, tmp_path / "a", IDS)
    provider = None
    with server.running():
        port = int(server.url.rsplit(":", 1)[1])
        provider = provider_of(tiny_verifier, server.url, retries=10_000)
        provider.available(EXAMPLES)
        server.status = 500 if how == "failing" else 200
        if how == "failing":
            threading.Timer(0.2, lambda: setattr(server, "status", 200)).start()
            require_right(provider, tiny_verifier)
    if how == "gone":
        found: list[BaseException | None] = []

        def ask() -> None:
            try:
                require_right(provider, tiny_verifier)
                found.append(None)
            except BaseException as error:
                found.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        with server.running(port):
            asking.join(60)
        assert found == [None]


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("mistral_window", "other", "it serves other now, and served tiny before"),
        ("llama_tied", "tiny", "it serves another model, or other weights"),
    ],
)
def test_another_model_at_the_same_address_ends_the_run(
    tmp_path: Path, tiny_verifier: CausalVerifier, kind: str, name: str, says: str
) -> None:
    other = tiny_verifier_of(kind)
    server = StatesServer(tiny_verifier, tmp_path / "a", IDS)
    with server.running():
        provider = provider_of(tiny_verifier, server.url)
        provider.available(EXAMPLES)
        server.verifier, server.model = other, name
        with pytest.raises(BlockdraftError, match=says):
            provider.get(EXAMPLES)


# --- a run ------------------------------------------------------------------------------------------------------


def settings_of(folder: Path, url: str, **changes: object) -> TrainSettings:
    base = TrainSettings(
        dtype="float32", data_path=folder / "data", save_path=folder / "run", target_layer_ids=TAPS, epochs=3.0,
        total_seq_len=80, max_anchors=16, mask_token_id=100, train_data_ratio=0.7, logger="none", lr=2e-3,
        muon_lr=0.02, num_layers=2, vllm_endpoint=(url,), states_memory_gib=0.0, max_retries=2, request_timeout=5.0,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def trained(settings: TrainSettings, verifier: CausalVerifier) -> bytes:
    plan = TrainingPlan(settings, verifier, EXAMPLES)
    try:
        Trainer.prepare(plan).run()
    finally:
        plan.states.close()
    return (settings.save_path / LAST / "model.safetensors").read_bytes()


def test_a_run_broken_by_its_server_goes_on_to_the_same_bits(
    server: StatesServer, tiny_verifier: CausalVerifier, tmp_path: Path
) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    wanted = trained(settings_of(tmp_path / "whole", server.url), tiny_verifier)
    settings = settings_of(tmp_path / "broken", server.url, checkpoint_freq=0.3)
    first = len(server.asked)

    def fail(tensors: dict[str, Any], answer: dict[str, Any], path: Path) -> None:
        if len(server.asked) > first + 30:
            nan(tensors)

    server.change = fail
    with pytest.raises(BlockdraftError, match="not finite, after"):
        trained(settings, tiny_verifier)
    server.change = None
    assert trained(settings, tiny_verifier) == wanted
    assert trained(settings_of(tmp_path, server.url, vllm_endpoint=()), tiny_verifier) == wanted


def test_states_are_asked_for_ahead_of_the_step_and_no_further(
    server: StatesServer, tiny_verifier: CausalVerifier
) -> None:
    states = TrainingStates(provider_of(tiny_verifier, server.url), EXAMPLES, 0.0, prefetch=2)
    rows = [[0, 1], [2], [3, 4], [5]]
    states.expect(rows)
    states.expect(rows)
    assert len(states._asked) == 2
    for number, row in enumerate(rows):
        states.expect(rows[number:])
        assert len(states.get(row)) == len(row)
    states.close()
    assert sorted(server.asked) == sorted(len(EXAMPLES[index].input_ids) for index in range(6))  # each once


def test_a_stop_does_not_wait_for_servers(server: StatesServer, tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        trained(settings_of(tmp_path, server.url, time_limit="0.000001", prefetch=8), tiny_verifier)


def test_vllms_own_connector_is_waited_for(server: StatesServer, tiny_verifier: CausalVerifier) -> None:
    """It holds a lock beside the file while it writes."""
    import fcntl

    held = []

    def locked(tensors: dict[str, Any], answer: dict[str, Any], path: Path) -> None:
        lock = path.with_name(path.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.write_bytes(b"half a")
        held.append(lock)

        def write() -> None:
            from safetensors.torch import save

            path.write_bytes(save(tensors))
            os.close(os.dup(lock.fileno()))
            fcntl.flock(lock, fcntl.LOCK_UN)

        threading.Timer(0.05, write).start()

    server.change = locked
    require_right(provider_of(tiny_verifier, server.url), tiny_verifier)
    assert not list(server.folder.iterdir())
