"""The stage that speaks: codec tokens in, PCM out."""
