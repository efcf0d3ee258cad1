"""What the engine decides: blocks, contexts, windows, units. Pure Python: no torch, no asyncio."""
