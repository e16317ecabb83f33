"""All checks of a checkpoint, in the order in which they are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from blockdraft.checkpoints.examine import decoder, layout, run, vocabulary, weights
from blockdraft.checkpoints.examine.facts import CheckpointFacts
from blockdraft.checkpoints.examine.finding import Check, Finding

CHECKS: tuple[Check, ...] = (
    Check("files", "Is every file there and whole, and does the index name what they hold?", weights.files),
    Check("layout", "Is the config of a layout that somebody reads?", layout.known_layout),
    Check("unknown-keys", "Does the config have keys that no reader knows?", layout.unknown_keys),
    Check("contract", "Do config, contract, weights and digest agree exactly? (our own checkpoints)", weights.contract),
    Check("method", "Do type, algorithm, command and tensors name one method?", layout.method_names),
    Check("draft-vocabulary", "One size in config, contract, head rows, map and command?", vocabulary.draft_vocabulary),
    Check("vocabulary-map", "Is the map in range, ascending, and the same in both tensors?", vocabulary.vocabulary_map),
    Check("verifier-vocabulary", "Is the vocabulary the verifier's?", vocabulary.verifier_vocabulary),
    Check("mask-token", "One mask token everywhere, inside the vocabulary, ending no reply?", vocabulary.mask_token),
    Check("block-size", "One block size in config, contract and command?", layout.block_size),
    Check("speculative-tokens", "Does the number of proposed tokens follow from the block?", layout.speculative_tokens),
    Check("anchor-slot", "Do all agree on whether the anchor's slot proposes a token?", layout.anchor_slot),
    Check("target-layers", "Ascending, the same everywhere, and within the verifier?", layout.target_layers),
    Check("fusion-width", "Does the fusion read as many hidden states as there are target layers?",
          layout.fusion_width),
    Check("verifier-names", "One verifier in config, contract and command, of this width?", layout.verifier_names),
    Check("depth", "One number of layers in config, contract, layer types, tensors and command?", decoder.depth),
    Check("rotary", "Do new and old rotary fields say the same?", decoder.rotary),
    Check("windows", "Do window, layer types and switch fit together?", decoder.windows),
    Check("causality", "Will vLLM let a slot see what it saw in training?", decoder.causality),
    Check("activation", "Is the activation one that vLLM's draft layers have?", decoder.activation),
    Check("tensor-names", "Is a tensor missing or left over?", weights.tensor_names),
    Check("shapes", "Do tensors have the shapes that the config gives them?", weights.shapes),
    Check("dtype", "Does the config name the dtype of the tensors?", weights.dtype),
    Check("numbers", "Is there NaN or infinity, or a dead matrix?", weights.numbers),
    Check("run-name", "Does a name claim other epochs than ran?", run.run_name),
    Check("hyperparameters", "Do command, settings and training state record the same values?", run.hyperparameters),
    Check("progress", "Did no more run than was asked for, and is the state of these weights?", run.progress),
    Check("card", "Does the model card have a license and name this verifier?", run.card),
)  # fmt: skip
VERIFIER = "verifier"  # the check that needs the verifier's files (`pipeline.check`)


def examine(facts: CheckpointFacts, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """What the checks find, in their order."""
    return [dataclasses.replace(finding, check=each.name) for each in checks for finding in each.run(facts)]
