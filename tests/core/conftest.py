"""What holds whatever the policy is run with each: `pytestmark = pytest.mark.usefixtures("each_policy")`."""

from __future__ import annotations

import pytest

from kvtier.core.policies import POLICIES
from tests.core.world import World


@pytest.fixture(params=POLICIES)
def each_policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(World, "policy", request.param)
    return str(request.param)
