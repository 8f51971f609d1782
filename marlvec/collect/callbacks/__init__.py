"""Callbacks: who is told what happens while a collector collects, and some that are ready to use."""

from marlvec.collect.callbacks.callback import HOOKS, Callback, Loss
from marlvec.collect.callbacks.episode_step import EpisodeStep
from marlvec.collect.callbacks.hooks import CallbackLike
from marlvec.collect.callbacks.json_lines import JSONLinesLogger
from marlvec.collect.callbacks.live_table import LiveTable
from marlvec.collect.callbacks.running_episode import RunningEpisode
from marlvec.collect.callbacks.tensorboard import TensorBoardLogger

__all__ = [
    "HOOKS",
    "Callback",
    "CallbackLike",
    "EpisodeStep",
    "JSONLinesLogger",
    "LiveTable",
    "Loss",
    "RunningEpisode",
    "TensorBoardLogger",
]
