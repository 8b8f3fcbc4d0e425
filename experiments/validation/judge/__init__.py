"""How long one step of a compiled program takes: a judge of plans that sees what a compiler made of them.

    judge(parse(compiled.as_text()), "h100:8")  # seconds

It shares nothing with the cost model that plans are made with, and has constants of its own.
"""

from .schedule import judge as judge
