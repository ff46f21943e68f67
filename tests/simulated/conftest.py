"""Combinations of parameters that nobody wants are not made at all, so that skipped tests are those that cannot run here."""

from __future__ import annotations

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """A test module may have a function `wanted(item)`; tests for which it is false do not exist."""
    found = yield
    wanted = getattr(collector.obj, "wanted", None) if isinstance(collector, pytest.Module) else None
    return [item for item in found if wanted(item)] if wanted is not None and isinstance(found, list) else found
