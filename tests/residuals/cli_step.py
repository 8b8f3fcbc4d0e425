"""A step for the command line."""

from tests.residuals import steps


def layers():
    return steps.sgd(steps.mlp), (steps.parameters(6, 64, 512), steps.batch(4096, 64))
