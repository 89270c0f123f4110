"""What engines and operators import: `EngineClient`, `Pages`, `AdminClient` and what they answer."""

from kvtier.client.admin import AdminClient
from kvtier.client.engine import EngineClient
from kvtier.client.pages import Pages
from kvtier.client.results import ClientStats, LoadResult, Offer, StoreResult

__all__ = ["AdminClient", "ClientStats", "EngineClient", "LoadResult", "Offer", "Pages", "StoreResult"]
