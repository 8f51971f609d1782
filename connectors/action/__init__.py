"""Action-side connectors: what stands between the policy's actions and the env."""

from __future__ import annotations

from marlvec.connectors.action.clip_actions import ClipActions
from marlvec.connectors.action.pipeline import ActionPipeline
from marlvec.connectors.action.read_only_actions import ReadOnlyActions
from marlvec.connectors.action.to_numpy import ToNumpy
from marlvec.connectors.action.unsquash_actions import UnsquashActions

__all__ = ["ActionPipeline", "ClipActions", "ReadOnlyActions", "ToNumpy", "UnsquashActions"]
