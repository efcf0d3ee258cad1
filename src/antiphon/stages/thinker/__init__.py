"""Hears, sees and decides: encoders, the language model, its context."""
