"""Plans of these tests are kept nowhere, unless a test says where."""

import pytest


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("UNITY_JAX_CACHE", "")
