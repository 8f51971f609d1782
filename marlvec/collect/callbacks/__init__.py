"""Base class of callbacks, called while a collector collects, and ready-made loggers."""

from marlvec.collect.callbacks.callback import HOOKS, Callback, LossReason
from marlvec.collect.callbacks.callback_list import CallbackLike
from marlvec.collect.callbacks.episode_step import EpisodeStep, RunningEpisode
from marlvec.collect.callbacks.json_lines import JSONLinesLogger
from marlvec.collect.callbacks.live_table import LiveTable
from marlvec.collect.callbacks.tensorboard import TensorBoardLogger

__all__ = [
    "HOOKS",
    "Callback",
    "CallbackLike",
    "EpisodeStep",
    "JSONLinesLogger",
    "LiveTable",
    "LossReason",
    "RunningEpisode",
    "TensorBoardLogger",
]
