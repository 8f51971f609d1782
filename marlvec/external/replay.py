"""Logged episodes, through the same door as those that run."""

from __future__ import annotations

from collections.abc import Iterator

from marlvec.errors import ArgumentError, EpisodesFull
from marlvec.external.logs import Dataset, Log, read_logs
from marlvec.external.thread import ExternalEnv
from marlvec.external.vector_env import ExternalVectorEnv

__all__ = ["Replay", "replay"]


class Replay(ExternalEnv):
    """Plays logged episodes again, as many at a time as there are free slots. Made by `replay`.

    Args:
        envs: Where.
        dataset: The episodes.
        repeat: How often; None: until it is stopped.
        training_enabled: Whether their rows go into batches.
    """

    def __init__(
        self, envs: ExternalVectorEnv, dataset: Dataset, *, repeat: int | None = 1, training_enabled: bool = True
    ) -> None:
        if repeat is not None and repeat < 1:
            raise ArgumentError(f"repeat must be at least 1, or None, got {repeat}")
        super().__init__(envs, dicts=True)
        self._read = read_logs(dataset, self.door.agents)
        self._repeat, self._training_enabled = repeat, training_enabled

    def run(self) -> None:
        """Play them all."""
        logs = self._logs()
        playing: list[Iterator[None]] = []
        todo = next(logs, None)
        while (todo is not None or playing) and not self.stopping:
            if todo is not None and len(playing) < self.door.num_envs:
                try:  # others may have taken the slots that are left
                    playing.append(self._play(todo, timeout=0.0 if playing else None))
                    next(playing[-1])
                except EpisodesFull:
                    playing.pop()
                else:
                    todo = next(logs, None)
                    continue
            # In turns, so that the collector finds rows of all of them.
            playing = [play for play in playing if next(play, self) is not self]

    def _logs(self) -> Iterator[Log]:
        rounds = 0
        while self._repeat is None or rounds < self._repeat:
            before = rounds
            for log in self._read():
                rounds = before + 1
                yield log
            if rounds == before:
                return  # there is none in it

    def _play(self, log: Log, timeout: float | None) -> Iterator[None]:
        """Begin an episode, and then say one row each time."""
        episode = self.start_episode(training_enabled=self._training_enabled, timeout=timeout)
        yield
        for moment in log.moments:
            if moment.rewards:
                self.log_returns(episode, moment.rewards)
            final_obs = {agent: obs for agent, (obs, _, _) in moment.ended.items()}
            flags = {
                "terminated": {agent: terminated for agent, (_, terminated, _) in moment.ended.items()},
                "truncated": {agent: truncated for agent, (_, _, truncated) in moment.ended.items()},
            }
            if moment is log.moments[-1]:
                self.end_episode(episode, final_obs, **flags)
            elif moment.ended:
                self.end_agents(episode, final_obs, **flags)
            if moment.obs:
                self.log_action(
                    episode, moment.obs, moment.actions, masks=moment.masks or None, as_policy=log.as_policy
                )
                yield


def replay(
    dataset: Dataset, envs: ExternalVectorEnv, *, repeat: int | None = 1, training_enabled: bool = True
) -> Replay:
    """Feed logged episodes through the door, as rows that no policy is asked about.

        envs = marlvec.external.make({"agent": (observations, actions)}, num_envs=8)
        with replay("run.npz", envs):
            batch = collector.collect(episodes=100)

    Everything applies to them as to episodes that run: connectors, mapping, metrics, batches. When all have been played
    and somebody waits for more, that raises `DriverGone`.

    Observations and actions of a saved batch are those on the policy's side of the connectors they were collected
    with: let the agent connectors pass on what these have done already. What policies added (``logp``, …) says
    nothing, as in every row that is off-policy. Actions of a Minari dataset are those that the env was given; see
    `Episode.log_action`.

    Args:
        dataset: A `MultiAgentBatch` or `SampleBatch`, a file that one saved (``.npz``, ``.parquet``), a list of these,
            which may hold parts of the same episodes, or a Minari dataset.
        envs: Where they are played.
        repeat: How often to play them all; None: until it is stopped.
        training_enabled: False: their rows go through everything, and into no batch.

    Returns:
        A `Replay`, to be used in a ``with`` block.

    Raises:
        ArgumentError: It is no dataset, or does not fit; see `read_logs`. An episode that lacks rows raises when it
            is its turn.
        CheckpointError: A file cannot be read.
    """
    return Replay(envs, dataset, repeat=repeat, training_enabled=training_enabled)
