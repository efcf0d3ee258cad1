"""The three stages of a call: thinker, talker, code2wav. Each has `state.py` and `stage.py`."""
