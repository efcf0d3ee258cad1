"""Model families: one folder each, with networks, checkpoint loading, tokens and prompts."""
