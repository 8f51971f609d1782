"""Policies: rows in, actions out.

A policy answers all ready rows of all envs in one call. It sees spaces and observations after the agent connectors,
and returns actions before the action connectors.
"""

from marlvec.policies.checkpoint import PolicyCheckpoint, load_checkpoint, load_policy, save_checkpoint, save_policy
from marlvec.policies.policy import (
    Acts,
    AnswerLimit,
    AsyncPolicy,
    FunctionPolicy,
    ObjectPolicy,
    Policy,
    PolicyLike,
    PolicyOutput,
    PolicyState,
    as_policy,
)
from marlvec.policies.policy_map import PolicyMap
from marlvec.policies.simple import Memory, RandomPolicy, Script, ScriptedPolicy

__all__ = [
    "Acts",
    "AnswerLimit",
    "AsyncPolicy",
    "FunctionPolicy",
    "Memory",
    "ObjectPolicy",
    "Policy",
    "PolicyCheckpoint",
    "PolicyLike",
    "PolicyMap",
    "PolicyOutput",
    "PolicyState",
    "RandomPolicy",
    "Script",
    "ScriptedPolicy",
    "as_policy",
    "load_checkpoint",
    "load_policy",
    "save_checkpoint",
    "save_policy",
]
