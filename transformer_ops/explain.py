"""explain(): a plan for reading."""

from __future__ import annotations

from .plan import Plan


class Explanation:
    def __init__(self, plans: list[Plan]) -> None:
        self.plans = plans

    def __str__(self) -> str:
        return "\n".join(str(plan) for plan in self.plans)
