from __future__ import annotations

import pytest

from kvtier.testing.index_tests import IndexTests, MakeIndex
from kvtier.testing.local_index import LocalIndex, LocalStore


class TestLocalIndex(IndexTests):
    @pytest.fixture
    def make_index(self) -> MakeIndex:
        store = LocalStore()
        return lambda **options: LocalIndex(store, **options)
