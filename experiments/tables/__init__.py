"""The papers' tables, and sweeps over machines, depths and parts of the planner."""
