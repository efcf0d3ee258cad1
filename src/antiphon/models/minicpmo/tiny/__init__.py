"""A checkpoint small enough to make in seconds: the official layout and names, random weights, noise for speech.

For tests, examples and a first look without a download. `write.py` makes the folder, `dimensions.py` says how large it
is, `weights.py` draws the weights, `behaviour.py` makes them listen and speak, `voice_models.py` stands in for the two
ONNX models. Shown by tests/models/test_tiny.py.
"""

from antiphon.models.minicpmo.tiny.write import tiny_config, tiny_tokenizer, write_tiny

__all__ = ["tiny_config", "tiny_tokenizer", "write_tiny"]
