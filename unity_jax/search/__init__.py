"""From a program and a machine to its best plan.

    plan(program, machine, limit, pins, meshes, rules)  over meshes and rewrites (`joint`)
    Planner(program, machine, limit).plan(meshes)       of one program as it is
    Candidate                                           what they find: a graph, its seconds and its memory
    Pins, NO_PINS                                       layouts that are fixed
    SearchOptions, Searched                             what a search may do, and what it did
"""

from unity_jax.search.candidate import NO_PINS, Candidate, Pins
from unity_jax.search.joint import plan
from unity_jax.search.options import SearchOptions
from unity_jax.search.planner import Planner
from unity_jax.search.searched import Searched

__all__ = ["NO_PINS", "Candidate", "Pins", "Planner", "SearchOptions", "Searched", "plan"]
