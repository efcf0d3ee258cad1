"""The engine on the network. asyncio and pydantic live here; torch does not."""
