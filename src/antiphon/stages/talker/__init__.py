"""Turns what the thinker says into codec tokens."""
