"""Programs rewritten by proved rules: where a rule's source occurs in a graph, and its target in place of it.

Importing this package fills the table of the ops that rules are made of.
"""

from unity_jax.rewrite import ops

__all__ = ["ops"]
