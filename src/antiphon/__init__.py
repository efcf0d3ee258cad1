"""Antiphon: an engine that serves full-duplex speech models."""
