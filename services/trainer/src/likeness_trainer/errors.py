"""What goes wrong in the trainer in a way that its user can act on; the command line prints the text and exits."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of every error that is told to the user without a traceback."""

    exit_code = 1


class ConfigError(TrainerError):
    """The recipe, an override or a variable is not valid."""

    exit_code = 2


class ModelLoadError(TrainerError, ValueError):
    """A model file is missing, not recognised, or a part of the model is absent."""

    exit_code = 2


class RunFolderError(TrainerError):
    """The run folder does not allow what was asked: it holds another run, or none."""

    exit_code = 2


class RewardUnavailableError(TrainerError):
    """The reward server did not answer in the time that the recipe allows. The run can be resumed."""

    exit_code = 75


class RewardRejectedError(TrainerError):
    """The reward server answered that the request itself is wrong; trying again cannot help."""

    exit_code = 1


class NonFiniteRunError(TrainerError):
    """Too many steps in a row gave NaN or infinity; the checkpoint of the last finite step is written."""

    exit_code = 1


class RanksDivergedError(TrainerError):
    """The processes of a run do not hold the same adapters any more: what they train is not one model."""

    exit_code = 1


class RunStoppedError(TrainerError):
    """A signal ended the run after a step; the checkpoint is written."""

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(f"stopped after step {step}, with a checkpoint; go on with --resume")
        self.exit_code = 128 + signal_number
