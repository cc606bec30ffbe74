"""One planning call and its results: the plan, and its Python steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..fusion.planning import PlanningSession
from ..op.names import OpName
from ..op.ops import Ops
from ..plan.plan import Plan, declarations_of
from ..quantization.scales import make_scales, note_run, warn_of_a_start
from .host import HostPlan


class Session(PlanningSession):
    """The object that C++ calls for users' fusions, and stores with the plan."""

    def __init__(self, basic_ops: Ops, names: Sequence[OpName]) -> None:
        super().__init__(basic_ops, names)
        self.plan: Plan | None = None  # converted from the finished plan when it is first needed

    def plan_of(self, entry: Any) -> Plan:
        """The finished plan."""
        if self.plan is None:
            near_misses = [*entry.near_misses, *self.near_misses()]
            self.plan = Plan(entry.text, entry.data, near_misses, self.python_ops)
        return self.plan

    def make_states(self, op: int, recipe: str, device: str, records: bool) -> None:
        """Makes the state of a recipe for the parameters of an op, if it does not exist, for calls
        on devices of that type. The plan `records` magnitudes, or only reads scales."""
        basic_op = self.basic_ops[op]
        owner = basic_op._parameter_owner
        if not basic_op._takes_scales:
            raise RuntimeError(
                f"[{type(owner).__name__}] recipe must be one without delayed scales for borrowed "
                f"parameters, whose module has no place for them, got '{recipe}'"
            )
        warn_of_a_start(owner)
        make_scales(owner, recipe, device)
        if records:
            note_run(owner)

    def make_host(self, entry: Any) -> HostPlan:
        """Makes the object for a plan with Python steps."""
        plan = self.plan_of(entry)
        rows = declarations_of(plan)
        return HostPlan(plan, entry.program, self.basic_ops, self.python_ops, rows)
