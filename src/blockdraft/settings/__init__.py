"""Every setting of every command: its default and its help text stand here and nowhere else.

A class is a command's settings; a field is a setting. The command line, recipe files and the record beside each
result are made from these classes, so that a name or default cannot differ between them. Precedence is flag, then
recipe file, then default. Values are checked where they are made, before any work.
"""

from blockdraft.settings.base import build, flag_name, identity, read_recipe, resolved
from blockdraft.settings.common import (
    CheckpointSettings,
    ComputeSettings,
    OriginSettings,
    SamplingSettings,
    VerifierSettings,
)
from blockdraft.settings.data import TRAIN_DATA_RATIO, ConvertSettings, PrepareSettings, RegenerateSettings
from blockdraft.settings.draft import DEFAULT_NUM_TAPS, DraftSettings, ObjectiveSettings
from blockdraft.settings.serving import CardSettings, CheckSettings, ParitySettings, ServeSettings
from blockdraft.settings.training import StatesSettings, TrainSettings
from blockdraft.settings.using import EvaluateSettings, GenerateSettings, QuickstartSettings

__all__ = [
    "DEFAULT_NUM_TAPS",
    "TRAIN_DATA_RATIO",
    "CardSettings",
    "CheckSettings",
    "CheckpointSettings",
    "ComputeSettings",
    "ConvertSettings",
    "DraftSettings",
    "EvaluateSettings",
    "GenerateSettings",
    "ObjectiveSettings",
    "OriginSettings",
    "ParitySettings",
    "PrepareSettings",
    "QuickstartSettings",
    "RegenerateSettings",
    "SamplingSettings",
    "ServeSettings",
    "StatesSettings",
    "TrainSettings",
    "VerifierSettings",
    "build",
    "flag_name",
    "identity",
    "read_recipe",
    "resolved",
]
