"""The three stages of a call: thinker, talker, code2wav. Each has its states in `state.py`."""
