"""Hidden states from running vLLM servers, as `blockdraft serve --extract` and Speculators' launcher start them.

A text is a completion request of one new token; the answer names a safetensors file with `hidden_states`
[T, ids, E], the raw outputs of layers by id (id i: after i layers), and `token_ids` [T]. The id after all layers gives
the final states. Every answer is checked: its ids, shape, dtype and numbers, and that what the output head makes of
the last state is the token that the server chose. So another model, a cut file or a cached prefix is never trained on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from blockdraft.errors import BlockdraftError, InputError
from blockdraft.progress import warn
from blockdraft.records import Example
from blockdraft.runtime import dtype_name
from blockdraft.training.hidden_states import ExampleStates
from blockdraft.verifiers.base import TrainingVerifier

FIELD = "--vllm-endpoint"
FOLDER_ID = ".blockdraft-states"
_POLL_SECONDS, _LONGEST_PAUSE = 0.005, 10.0
_WRONG_ANSWERS = 3  # in a row, for one text; lost connections have --max-retries
# How far under the largest logit that of the server's own token may lie, in standard deviations of the logits: no
# further than rounding takes it.
_TIE = {torch.float32: 0.01, torch.bfloat16: 0.25}
_REQUEST = {"max_tokens": 1, "temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "return_token_ids": True}  # fmt: skip


class _LostError(Exception):
    """A server did not answer; it may later."""


class _WrongAnswerError(Exception):
    """A server answered something else than the states of the text."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How a server is asked.

    Attributes:
        retries: how often a request is sent again before the run ends.
        timeout: seconds that one may take.
        workers: requests that are in flight at once.
    """

    retries: int = 20
    timeout: float = 180.0
    workers: int = 8


class _Server:
    """One server: its address, the model it serves, and whether it was lost when last asked."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url.rstrip("/")
        self.model: str | None = None
        self._first_model: str | None = None
        self.longest: int | None = None
        self.away_until = 0.0
        # Proxies are for other machines.
        self.http = httpx.Client(timeout=timeout, trust_env=False, limits=httpx.Limits(max_connections=None))

    def look(self) -> None:
        """Ask what it serves.

        Raises:
            _LostError: it does not answer.
        """
        entries = self._json("GET", "/v1/models")
        try:
            entry = entries["data"][0]
            self.model, self.longest = str(entry["id"]), entry.get("max_model_len")
        except (KeyError, TypeError, IndexError):
            raise _WrongAnswerError("its list of models is none of vLLM's") from None
        self._first_model = self._first_model or self.model
        if self.model != self._first_model:
            found, self.model = self.model, None
            raise _WrongAnswerError(f"it serves {found} now, and served {self._first_model} before")

    def complete(self, tokens: Sequence[int]) -> dict[str, Any]:
        if self.model is None:
            self.look()
        return self._json("POST", "/v1/completions", {"model": self.model, "prompt": list(tokens), **_REQUEST})

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            answer = self.http.request(method, self.url + path, json=body)
            if answer.status_code >= 500 or answer.status_code == 404:  # 404: another model is served now
                self.model = None
                raise _LostError(f"status {answer.status_code}")
            if answer.status_code >= 400:
                raise _WrongAnswerError(f"status {answer.status_code}: {answer.text[:300]}")
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            self.model = None  # whoever answers next may serve another one
            raise _LostError(str(error) or type(error).__name__) from None
        if not isinstance(found, dict):
            raise _WrongAnswerError("its answer is not an object")
        return found


class EngineStates:
    """A provider that asks servers, in turn.

    A server that does not answer is left out for a while, then asked again.

    Args:
        urls: addresses such as http://127.0.0.1:8000, all with the same model.
        target_layer_ids: taps to give.
        with_final: give the states after the final norm, too.

    Raises:
        InputError: none answers, or one serves other states than those of this verifier.
    """

    reads_ahead = True

    def __init__(
        self,
        urls: Sequence[str],
        verifier: TrainingVerifier,
        target_layer_ids: Sequence[int],
        with_final: bool = False,
        patience: Patience = Patience(),
    ) -> None:
        if verifier.has_encoder:
            raise InputError(FIELD, ", ".join(urls), "vLLM gives no hidden states of encoder-decoder verifiers")
        self.verifier, self.target_layer_ids, self.with_final = verifier, tuple(target_layer_ids), with_final
        self.urls, self._patience = tuple(urls), patience
        kept = len(self.target_layer_ids) + with_final
        self.bytes_per_token = kept * verifier.identity.hidden_size * verifier.dtype.itemsize + 8
        self._servers = [_Server(url, patience.timeout) for url in urls]
        self._pool = ThreadPoolExecutor(patience.workers, thread_name_prefix="states")
        self._turn, self._lock, self._closed = 0, threading.Lock(), threading.Event()

    def giving(self, target_layer_ids: Sequence[int], with_final: bool) -> EngineStates:
        """The same servers, asked for other taps."""
        return EngineStates(self.urls, self.verifier, target_layer_ids, with_final, self._patience)

    def available(self, examples: Sequence[Example]) -> Sequence[Example]:
        """All, once a server has shown on the shortest that it serves this verifier's states."""
        shortest = min(examples, key=lambda example: len(example.input_ids))
        longest = max(len(example.input_ids) for example in examples)
        lost = []
        for server in self._servers:
            try:
                server.look()
                if server.longest is not None and longest >= server.longest:
                    raise InputError(
                        FIELD, server.url, f"its --max-model-len {server.longest} has no room for a text of {longest} "
                        "tokens and one new one; start it with more",
                    )  # fmt: skip
                self._checked(server, shortest)
            except _LostError as error:
                lost.append(f"{server.url} ({error})")
                self._leave_out(server)
            except _WrongAnswerError as error:
                raise InputError(FIELD, server.url, str(error)) from None
        if len(lost) == len(self._servers):
            raise InputError(FIELD, ", ".join(lost), "no server answers; start one with blockdraft serve --extract")
        for each in lost:
            warn(f"hidden states: no answer from {each}; it is asked again later")
        return examples

    def prepare(self, examples: Sequence[Example]) -> None:
        pass

    def get(self, examples: Sequence[Example]) -> list[ExampleStates]:
        found = list(self._pool.map(self._ask, examples))
        return [self._given(example, taps, raw) for example, (taps, raw) in zip(examples, found, strict=True)]

    def close(self) -> None:
        """Ask for nothing more."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _given(self, example: Example, taps: Tensor, raw: Tensor) -> ExampleStates:
        device, first = self.verifier.device, example.first_target - 1
        final = self.verifier.normed(raw.to(device))
        greedy = torch.full((len(example.input_ids),), -1, device=device)
        greedy[first:] = self.verifier.greedy(final[first:])
        return ExampleStates(taps.to(device), greedy, final if self.with_final else None)

    def _ask(self, example: Example) -> tuple[Tensor, Tensor]:
        """Taps and raw last outputs, asked for until they come and are right."""
        lost, wrong = 0, 0
        while not self._closed.is_set():
            server = self._next()
            try:
                return self._checked(server, example)
            except _LostError as error:
                lost, said = lost + 1, f"no answer from {server.url} ({error})"
                self._leave_out(server)
            except _WrongAnswerError as error:
                wrong, said = wrong + 1, f"{server.url}: {error}"
            if lost > self._patience.retries or wrong >= _WRONG_ANSWERS:
                raise BlockdraftError(
                    f"hidden states of example {example.id}: {said}, after {lost + wrong} tries; look at the server, "
                    "then give the same command again"
                )
            if lost == 1 and not wrong:
                warn(f"hidden states: {said}; trying again")
            self._closed.wait(min(_LONGEST_PAUSE, 0.25 * 2 ** (lost + wrong - 1)))
        raise BlockdraftError("hidden states: the run has ended")

    def _next(self) -> _Server:
        """The next server in turn that is not left out, else the one that comes back first."""
        with self._lock:
            now = time.monotonic()
            here = [server for server in self._servers if server.away_until <= now]
            if not here:
                return min(self._servers, key=lambda server: server.away_until)
            self._turn += 1
            return here[self._turn % len(here)]

    def _leave_out(self, server: _Server) -> None:
        with self._lock:
            server.away_until = time.monotonic() + _LONGEST_PAUSE / 2

    def _checked(self, server: _Server, example: Example) -> tuple[Tensor, Tensor]:
        answer = server.complete(example.input_ids)
        try:
            (choice,), facts = answer["choices"], answer["kv_transfer_params"]
            chosen, path = int(choice["token_ids"][0]), str(facts["hidden_states_path"])
        except (KeyError, TypeError, ValueError, IndexError):
            raise _WrongAnswerError("it gives no hidden states; start it with blockdraft serve --extract") from None
        content = self._file(server, path, facts)
        try:
            tensors = load(content)
            states, tokens = tensors["hidden_states"], tensors["token_ids"]
        except (SafetensorError, KeyError, ValueError) as error:
            raise _WrongAnswerError(f"its file is damaged ({error})") from None
        return self._parts(states, tokens, facts.get("layer_ids"), chosen, example)

    def _parts(
        self, states: Tensor, tokens: Tensor, stated: Any, chosen: int, example: Example
    ) -> tuple[Tensor, Tensor]:
        """The taps and the raw last outputs of an answer that is right."""
        verifier, depth = self.verifier, self.verifier.identity.num_layers
        ids = list(stated) if stated is not None else [*self.target_layer_ids, depth]
        wanted = [*self.target_layer_ids, depth]
        if missing := sorted(set(wanted) - set(ids)):
            raise _WrongAnswerError(
                f"it gives layers {ids}, not {missing}; start it with --target-layer-ids "
                f"{' '.join(str(each) for each in self.target_layer_ids)}"
            )
        if tokens.tolist() != list(example.input_ids):
            raise _WrongAnswerError("its states are of other tokens")
        shape = (len(example.input_ids), len(ids), verifier.identity.hidden_size)
        if tuple(states.shape) != shape:
            raise _WrongAnswerError(
                f"its states are {list(states.shape)}, not {list(shape)}"
                + ("; start it with --no-enable-prefix-caching" if len(states) < shape[0] else "")
            )
        if states.dtype != verifier.dtype:
            raise _WrongAnswerError(
                f"its states are {dtype_name(states.dtype)}, and training is in {dtype_name(verifier.dtype)}; give "
                "both the same --dtype"
            )
        if not bool(states.isfinite().all()):
            raise _WrongAnswerError("its states hold numbers that are not finite")
        raw = states[:, ids.index(depth)].contiguous()
        logits = verifier.logits(verifier.normed(raw[-1:].to(verifier.device)))[0]
        short = float(logits.max() - logits[chosen]) if 0 <= chosen < len(logits) else float("inf")
        if short > _TIE.get(verifier.dtype, 0.25) * float(logits.std()):
            raise _WrongAnswerError(
                f"it chose token {chosen} behind its states, and this verifier's head says {int(logits.argmax())}: it "
                "serves another model, or other weights"
            )
        return states[:, [ids.index(tap) for tap in self.target_layer_ids]].contiguous(), raw

    def _file(self, server: _Server, path: str, facts: dict[str, Any]) -> bytes:
        """The bytes of a file, which is removed."""
        folder, name = Path(path).parent, Path(path).name
        marker, stated = folder / FOLDER_ID, facts.get("folder_id")
        is_here = folder.is_dir() if stated is None else marker.is_file() and marker.read_text() == stated
        until = time.monotonic() + self._patience.timeout
        if is_here:
            return self._from_folder(Path(path), locked=stated is None, until=until)
        port = facts.get("states_port")
        if port is None:
            raise _WrongAnswerError(
                f"it writes to {folder}, which is not here; share it, or start the server with "
                "blockdraft serve --extract"
            )
        url = f"{urlsplit(server.url).scheme}://{urlsplit(server.url).hostname}:{port}/{name}"
        try:
            while (answer := server.http.get(url)).status_code == 404 and time.monotonic() < until:
                continue  # the server has waited
            if answer.status_code != 200:
                raise _LostError(f"status {answer.status_code} for {name}")
            server.http.delete(url)
        except httpx.HTTPError as error:
            raise _LostError(str(error) or type(error).__name__) from None
        return answer.content

    def _from_folder(self, path: Path, locked: bool, until: float) -> bytes:
        lock = path.with_name(path.name + ".lock")
        while not path.is_file() or (locked and _is_held(lock)):
            if time.monotonic() > until:
                raise _LostError(f"{path.name} was not written")
            if self._closed.wait(_POLL_SECONDS):
                raise _LostError("the run has ended")
        try:
            content = path.read_bytes()
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        except OSError as error:
            raise _LostError(str(error)) from None
        return content


def _is_held(lock: Path) -> bool:
    """Whether vLLM's own connector is still writing: it holds the lock until then."""
    import fcntl

    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
