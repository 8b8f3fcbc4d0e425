import pytest

from tests.ops import harness


@pytest.fixture(autouse=True, scope="session")
def one_axis(request):
    harness.ONE_AXIS = request.config.getoption("--one-axis")
