"""`blockdraft regenerate`: prepared data with the verifier's own replies.

Replies are written turn by turn: all first ones, then all second ones, each after the verifier's own earlier replies.
Every reply is in a journal as soon as it is there; the folder appears when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.contract import VerifierIdentity
from blockdraft.data.accounts import Accounts
from blockdraft.data.conversations import Conversation, RowError, reply_turns
from blockdraft.data.journal import Journal
from blockdraft.data.record import read_record
from blockdraft.data.requests import Request, next_request, with_replies
from blockdraft.data.table import RECORD, REJECTS, TABLE, flat, read_table, write_rows
from blockdraft.data.templates import ChatTemplate, truncated
from blockdraft.digests import digest_of, file_digest
from blockdraft.errors import BlockdraftError, InputError
from blockdraft.files import locked, replacing, require_free, write_json
from blockdraft.pipeline.loading import verifier_of
from blockdraft.pipeline.prepare import chat_template, made_before
from blockdraft.progress import warn
from blockdraft.responses.in_process import write_replies
from blockdraft.responses.probe import PROMPTS, require_author
from blockdraft.responses.server import Server, find_server
from blockdraft.responses.server import write_replies as ask_for_replies
from blockdraft.runtime import dtype_name
from blockdraft.settings import RegenerateSettings, SamplingSettings
from blockdraft.verifiers.base import Verifier
from blockdraft.verifiers.hub import is_gguf
from blockdraft.verifiers.text_side import TextSide, read_text_side

_JOURNAL = ".replies."
_PROBED_ROWS = 64  # rows of the data among which a server's probes are chosen
# What prepared data state and regenerated data keep.
_KEPT_FACTS = (
    "thinking", "tools", "rewritten_history", "max_source_length", "max_length", "tokenizer", "chat_template",
    "train_data_ratio",
)  # fmt: skip


def regenerate(settings: RegenerateSettings, verifier: Verifier | None = None) -> dict[str, Any]:
    """Write a data folder with the verifier's replies.

    Args:
        verifier: one that is loaded already; else the one the settings name.
    """
    if (settings.save_path / RECORD).exists():
        return _regenerate(settings, verifier)
    with locked(settings.save_path, "--save-path"):
        return _regenerate(settings, verifier)


def _regenerate(settings: RegenerateSettings, verifier: Verifier | None) -> dict[str, Any]:
    prepared = read_record(settings.data_path, "--data-path")
    text_side = read_text_side(settings.verifier_name_or_path, settings.trust_remote_code, settings.revision)
    _require_same_text(settings, prepared["facts"], text_side)
    server = find_server(settings.endpoint, settings.model) if settings.endpoint else None
    if server is None:
        verifier = verifier or verifier_of(settings)
        author: VerifierIdentity | None = verifier.identity
    else:
        author = _author(settings, server, prepared["facts"], text_side)
    facts = _facts(settings, prepared, author, server, verifier)
    if (made := made_before(settings.save_path, facts)) is not None:
        return made
    require_free(settings.save_path, "--save-path", own=_JOURNAL)
    for earlier in settings.save_path.glob(f"{_JOURNAL}*.jsonl"):
        raise InputError(
            "--save-path",
            earlier,
            "an earlier version began this run; finish it with that version, or delete this file",
        )
    context = None if server is not None or verifier is None else verifier.context_length
    run = _Run(settings, prepared, text_side, digest_of(facts), context)
    with contextlib.closing(run.journal):
        if server is None:
            assert verifier is not None
            sampling = SamplingSettings(
                max_new_tokens=settings.max_new_tokens, temperature=settings.temperature, top_k=settings.top_k,
                top_p=settings.top_p, seed=settings.seed,
            )  # fmt: skip
            run.write(lambda asked: write_replies(verifier, asked, sampling, settings.batch_size, run.journal))
        else:
            run.write(lambda asked: ask_for_replies(server, asked, run.template, settings, run.journal))
        return {**run.finish(facts), "folder": str(settings.save_path)}


def _require_same_text(settings: RegenerateSettings, facts: dict[str, Any], text_side: TextSide) -> None:
    for name, value in text_side.facts().items():
        if facts.get(name) != value:
            raise InputError(
                "--data-path",
                settings.data_path,
                f"was prepared with another {name.replace('_', ' ')} than {settings.verifier_name_or_path} has; "
                "prepare it for this verifier",
            )


def _author(
    settings: RegenerateSettings, server: Server, facts: dict[str, Any], text_side: TextSide
) -> VerifierIdentity | None:
    """Who is proved to answer behind an address; None where nobody looked, or the verifier cannot be loaded here."""
    if is_gguf(settings.verifier_name_or_path):
        raise InputError(
            "--verifier-name-or-path", settings.verifier_name_or_path,
            "a server reads a folder; unpack it with blockdraft convert and name that folder",
        )  # fmt: skip
    if not settings.probe:
        warn(f"{server.model} at {server.url} was not probed: the data will have an unknown author")
        return None
    try:
        exact = verifier_of(dataclasses.replace(settings, dtype="float32"))
    except (InputError, MemoryError) as error:
        warn(f"{server.model} at {server.url} cannot be probed, the data will have an unknown author: {error}")
        return None
    template = chat_template(text_side, facts)
    require_author(
        server, _probes(settings, facts, template), template, settings, exact,
        lambda: verifier_of(dataclasses.replace(settings, dtype="bfloat16")),
    )  # fmt: skip
    return exact.identity


def _probes(settings: RegenerateSettings, facts: dict[str, Any], template: ChatTemplate) -> list[Request]:
    """The shortest of the first prompts of the data."""
    found: list[Request] = []
    for row in read_table(settings.data_path, "--data-path").select(["id", "part", "conversation"]).to_pylist():
        if row["part"] or row["conversation"] is None:
            continue
        with contextlib.suppress(RowError):
            conversation = Conversation.from_json(row["conversation"])
            request = next_request(conversation, row["id"], 0, template, facts["max_source_length"])
            found += [request] if request is not None else []
        if len(found) >= _PROBED_ROWS:
            break
    return sorted(found, key=lambda request: (len(request.prompt), request.id))[:PROMPTS]


def _facts(
    settings: RegenerateSettings,
    prepared: dict[str, Any],
    author: VerifierIdentity | None,
    server: Server | None,
    verifier: Verifier | None,
) -> dict[str, Any]:
    """Everything that determines the result; `verifier` stands in it only where that is known to be the author."""
    written_by: dict[str, Any]
    if server is not None:
        written_by = {"engine": "server", "model": server.model}
    else:
        assert verifier is not None
        written_by = {"engine": "in process", "dtype": dtype_name(verifier.dtype), "batch_size": settings.batch_size}
    if author is None:
        written_by["author"] = "unknown"
    else:
        written_by["verifier"] = {name: getattr(author, name) for name in author.COMPARED}
    drawn = {name: getattr(settings, name) for name in ("top_k", "top_p", "seed")} if settings.temperature else {}
    return {
        "data": prepared["digest"],
        **{name: prepared["facts"][name] for name in _KEPT_FACTS},
        **written_by,
        **{name: getattr(settings, name) for name in ("max_new_tokens", "temperature", "drop_truncated")},
        **drawn,
    }


@dataclass(frozen=True, slots=True)
class _Item:
    """A conversation of the prepared table."""

    id: str
    row: dict[str, Any]
    conversation: Conversation


class _Run:
    def __init__(
        self,
        settings: RegenerateSettings,
        prepared: dict[str, Any],
        text_side: TextSide,
        request: str,
        context_length: int | None,
    ) -> None:
        self.settings, self.prepared, self.context_length = settings, prepared, context_length
        facts = prepared["facts"]
        self.template: ChatTemplate = chat_template(text_side, facts)
        self.limits = facts["max_source_length"], facts["max_length"]
        self.rejected: dict[str, tuple[str, RowError]] = {}
        self.items = list(self._items())
        self.journal = Journal(settings.save_path / f"{_JOURNAL}{request}.db")

    def _items(self) -> Iterator[_Item]:
        names = ["id", "part", "source", "key", "conversation"]
        for row in read_table(self.settings.data_path, "--data-path").select(names).to_pylist():
            if row["part"]:
                continue  # the first text of a conversation has all of it
            if row["conversation"] is None:
                error = RowError("token ids without a conversation", "the verifier cannot write their replies anew")
                self.rejected[row["id"]] = (row["source"], error)
                continue
            yield _Item(row["id"], row, Conversation.from_json(row["conversation"]))

    def write(self, write_replies: Callable[[Sequence[Request]], None]) -> None:
        """Turn by turn until every reply is in the journal."""
        longest = max((len(reply_turns(item.conversation.messages)) for item in self.items), default=0)
        for number in range(longest):
            requests = [request for item in self.items if (request := self._request(item, number))]
            write_replies(requests)
            for request in requests:
                reply = self.journal.get(request.id, request.turn)
                if reply is not None and reply.rejected is not None:
                    self._reject(request.id, RowError("the server refuses it", reply.rejected))
        share = len(self.rejected) / max(1, len(self.items))
        if share > self.settings.max_reject_share:
            reasons = Counter(error.reason for _, error in self.rejected.values())
            _, first = next(iter(self.rejected.values()))
            raise BlockdraftError(
                f"--max-reject-share: {self.settings.max_reject_share}: {len(self.rejected)} of {len(self.items)} "
                f"conversations got no reply ({', '.join(f'{n} {reason}' for reason, n in reasons.items())}; "
                f"the first: {first}); replies are kept, raise it or mend what refuses them"
            )

    def _request(self, item: _Item, number: int) -> Request | None:
        if item.id in self.rejected:
            return None
        try:
            written = with_replies(item.conversation, item.id, self.journal, self.template)
            request = next_request(written, item.id, number, self.template, self.limits[0])
            if request is not None and self.context_length and len(request.prompt) >= self.context_length:
                raise RowError("prompt over the verifier's context", f"{len(request.prompt)} tokens")
            return request
        except RowError as error:
            self._reject(item.id, error)
            return None

    def _reject(self, identity: str, error: RowError) -> None:
        self.rejected[identity] = (identity.partition(":")[0], error)

    def finish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write the folder; the journal has done its work then."""
        accounts = Accounts(self.prepared["sources"], self.prepared["facts"]["train_data_ratio"])
        with replacing(self.settings.save_path) as folder:
            write_rows(folder / TABLE, accounts.counting(self._rows()))
            record = {"facts": facts, "sources": self._sources(accounts), **accounts.totals()}
            record["digest"] = file_digest(folder / TABLE, TABLE)
            lines = [
                json.dumps({"source": source, "id": identity, "reason": error.reason, "detail": error.detail})
                for identity, (source, error) in self.rejected.items()
            ]
            (folder / REJECTS).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            write_json(folder / RECORD, record)
            self.journal.close()
        return record

    def _rows(self) -> Iterator[dict[str, Any]]:
        for item in self.items:
            if item.id in self.rejected:
                continue
            written = with_replies(item.conversation, item.id, self.journal, self.template)
            replies = {turn: self._tokens(item.id, turn) for turn in reply_turns(written.messages)}
            try:
                texts = [truncated(text, *self.limits)[0] for text in self.template.encode_written(written, replies)]
                if self.settings.drop_truncated and texts[-1].finish == "length":
                    raise RowError("reply cut short", f"{self.settings.max_new_tokens} tokens")
            except RowError as error:
                self._reject(item.id, error)
                continue
            for number, text in enumerate(texts):
                yield {
                    **{name: item.row[name] for name in ("id", "source", "key")},
                    "part": number,
                    "conversation": None if number else written.to_json(),
                    "source_ids": text.source_ids,
                    "input_ids": text.input_ids,
                    "targets": flat(text.targets),
                    "finish": text.finish,
                }

    def _tokens(self, identity: str, turn: int) -> list[int]:
        reply = self.journal.get(identity, turn)
        assert reply is not None
        return reply.tokens

    def _sources(self, accounts: Accounts) -> dict[str, Any]:
        found = {}
        for name in self.prepared["sources"]:
            read = sum(item.row["source"] == name for item in self.items)
            rejected = Counter(error.reason for source, error in self.rejected.values() if source == name)
            kept = read - sum(rejected.values())
            found[name] = {"read": read, "kept": kept, "dropped": {}, "rejected": dict(rejected), **accounts.of(name)}
        return found
