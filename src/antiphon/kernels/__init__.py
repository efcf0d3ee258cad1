"""One folder per operator: `reference.py` in plain torch, `op.py` with the contract, checks and dispatch."""
