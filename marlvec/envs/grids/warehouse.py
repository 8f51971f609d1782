"""rware's env, by options in words, and with frames."""

from __future__ import annotations

from typing import Any

from rware import warehouse


class Warehouse(warehouse.Warehouse):  # type: ignore[misc]  # Any where rware is not installed
    """rware's ``Warehouse``, with frames and with rware's enums by name.

    ``reward_type`` is ``"individual"``, ``"global"``, ``"two_stage"``, ``observation_type`` is ``"flattened"``,
    ``"dict"``, ``"image"``, ``"image_dict"``, so that ids need not import the enums. ``render()`` returns a frame where
    the env was made with ``render_mode="rgb_array"``: rware's own opens a window.
    """

    def __init__(self, *, reward_type: Any, observation_type: Any = "flattened", **kwargs: Any) -> None:
        super().__init__(
            reward_type=_member(warehouse.RewardType, reward_type),
            observation_type=_member(warehouse.ObservationType, observation_type),
            **kwargs,
        )

    def render(self, mode: str | None = None) -> Any:
        """Draw the env: ``"rgb_array"`` returns a frame, ``"human"`` opens a window; None: as ``render_mode`` says."""
        if self.renderer is not None:  # rware wipes the window that was drawn in last, which may be another env's
            self.renderer.window.switch_to()
        return super().render(mode or self.render_mode or "human")


def _member(enum: Any, value: Any) -> Any:
    return enum[value.upper()] if isinstance(value, str) else value
