"""Batches: what a collector returns, cut, joined, shuffled, converted and saved."""

from marlvec.collect.batch.multi_agent_batch import MultiAgentBatch
from marlvec.collect.batch.sample_batch import SampleBatch

__all__ = ["MultiAgentBatch", "SampleBatch"]
