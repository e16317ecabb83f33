"""A small T5Gemma 2 trained from scratch, since a draft can only learn from a verifier that has something to say.

    python tests/assets/t5gemma2.py FOLDER [--pairs pairs.csv] [--steps 900]

Without --pairs it learns made-up pairs (`venues`). A CSV file has columns `mr` and `ref`, as the E2E challenge has.
`small_t5gemma2()` keeps what it trains under a cache folder, by the content of this code and of the pairs.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, T5Gemma2Config, T5Gemma2ForConditionalGeneration

sys.path.insert(0, str(Path(__file__).parent))

from once import made_once
from venues import Pair, venue_pairs

from blockdraft.files import replacing, write_text

PAIRS = "BLOCKDRAFT_PAIRS"  # names a CSV file of real pairs to learn instead
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
PAD, EOS, BOS, UNK, MASK, BOI, EOI, IMAGE = range(8)
VOCABULARY, BATCH, LEARNING_RATE = 1500, 16, 1e-3
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}"


@dataclass(frozen=True)
class Asset:
    """A verifier's folder, and prompt files divided by source."""

    folder: Path

    @property
    def verifier(self) -> Path:
        return self.folder / "verifier"

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def heldout(self) -> Path:
        return self.folder / "heldout.jsonl"


def small_t5gemma2() -> Asset:
    """The asset of the default pairs, or of those that the environment names; trained at the first call."""
    named = os.environ.get(PAIRS)
    steps = 900 if named else 300
    pairs = read_pairs(Path(named)) if named else venue_pairs(4000, seed=0)
    code = [path.read_bytes() for path in (Path(__file__), Path(__file__).with_name("venues.py"))]
    key = hashlib.sha256(b"".join([*code, repr((pairs, torch.__version__)).encode()])).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "blockdraft" / f"t5gemma2-{key}"
    return Asset(made_once(folder, lambda new: make(new, pairs, steps)))


def read_pairs(path: Path) -> list[Pair]:
    """Pairs of a CSV file with columns `mr` and `ref`."""
    with path.open(encoding="utf-8", newline="") as handle:
        return [(row["mr"], row["ref"]) for row in csv.DictReader(handle)]


def make(folder: Path, pairs: Sequence[Pair], steps: int) -> None:
    """Train a model and write it with its prompts, whole or not at all."""
    heldout = {source for source, _ in pairs if hashlib.sha256(source.encode()).digest()[0] < 26}  # a tenth
    supervised = [pair for pair in pairs if pair[0] not in heldout]
    tokenizer = make_tokenizer(supervised)
    model = train(make_model(), tokenizer, supervised, steps)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as temporary:
        model.save_pretrained(temporary / "verifier")
        tokenizer.save_pretrained(temporary / "verifier")
        for name, sources in (("train", {source for source, _ in supervised}), ("heldout", heldout)):
            lines = "".join(json.dumps({"prompt": source}) + "\n" for source in sorted(sources))
            write_text(temporary / f"{name}.jsonl", lines)


def make_tokenizer(pairs: Sequence[Pair]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the pairs' own text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator((text for pair in pairs for text in pair), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", mask_token="<mask>",
        chat_template=TEMPLATE,
    )  # fmt: skip


def make_model() -> T5Gemma2ForConditionalGeneration:
    """1.6M parameters: 3 encoder layers, 6 decoder layers (5 sliding with a window of 16 tokens, one full)."""
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16,
        "max_position_embeddings": 512, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS,
        "initializer_range": 0.05,
    }  # fmt: skip
    sliding = ["sliding_attention"] * 5
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 4, "patch_size": 2}  # fmt: skip
    encoder = {
        "text_config": {**text, "num_hidden_layers": 3, "layer_types": [*sliding[:2], "full_attention"]},
        "vision_config": vision, "mm_tokens_per_image": 4, "boi_token_index": BOI, "eoi_token_index": EOI,
    }  # fmt: skip
    decoder = {**text, "num_hidden_layers": 6, "layer_types": [*sliding, "full_attention"]}
    model = T5Gemma2ForConditionalGeneration(T5Gemma2Config(encoder=encoder, decoder=decoder, image_token_index=IMAGE))
    # No text holds an image's end, so that its row stays as it is: not zero, or nobody would notice a wrong one.
    torch.nn.init.normal_(model.get_input_embeddings().eoi_embedding)
    model.generation_config.decoder_start_token_id = BOS
    return model


def train(
    model: T5Gemma2ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair], steps: int
) -> T5Gemma2ForConditionalGeneration:
    """Teach the model to write targets, by AdamW with a short warm-up and a linear decline."""
    sources, targets = (
        [torch.tensor(tokenizer(text)["input_ids"]) for text in side] for side in zip(*pairs, strict=True)
    )
    end = torch.tensor([EOS])
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1.1 - step / steps, 1))
    generator = torch.Generator().manual_seed(0)
    model.train()
    for step in range(steps):
        chosen = torch.randint(len(pairs), (BATCH,), generator=generator).tolist()
        read = pad_sequence([sources[index] for index in chosen], batch_first=True, padding_value=PAD)
        wanted = [torch.cat([targets[index], end]) for index in chosen]
        labels = pad_sequence(wanted, batch_first=True, padding_value=-100)
        logits = model(
            input_ids=read,
            attention_mask=(read != PAD).long(),
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),
        ).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"t5gemma2: step {step + 1} of {steps}, loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=Path, help="CSV file with columns mr and ref; default: made-up venues")
    parser.add_argument("--steps", type=int, default=900)
    options = parser.parse_args()
    make(options.folder, read_pairs(options.pairs) if options.pairs else venue_pairs(4000, seed=0), options.steps)


if __name__ == "__main__":
    main()
