"""Voice activity detection on the server: when a caller speaks, for clients that ask for `server_vad`.

`detector.py` makes turns of probabilities, which are `silero.py`'s, or `energy.py`'s where there is no model file.
Without `server_vad` nothing here runs: the model that answers decides by itself. Shown by tests/server/vad.
"""
