"""Published planning problems, and a solver for problems of tens of thousands of nodes under a memory limit.

    load(path)        an instance of the ASPLOS 2025 contest as a `Problem`
    solve(problem)    an `Answer`: strategies that cost little and fit, without a proof
"""

from unity_jax.solver.iopddl import load
from unity_jax.solver.solve import Answer, solve

__all__ = ["Answer", "load", "solve"]
