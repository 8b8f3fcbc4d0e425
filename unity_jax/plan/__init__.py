"""Plans: how a function runs on a mesh, as a value, and what is made of it.

    Plan                    the value (`PlanValue`), which can be printed, explained, verified, saved and loaded
    Leaf, Predicted         what it says of an argument or a result, and of a step
    Verification            a plan beside its program as lowered and as compiled
    make_plan(mesh, ...)    the plan that a candidate of the search stands for

`table`, `page` and `explain` tell what a plan says, `file` and `cache` keep it.
"""

from unity_jax.plan.make import make_plan
from unity_jax.plan.plan import Plan
from unity_jax.plan.value import Leaf, PlanValue, Predicted
from unity_jax.plan.verify import Verification

__all__ = ["Leaf", "Plan", "PlanValue", "Predicted", "Verification", "make_plan"]
