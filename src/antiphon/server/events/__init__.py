"""Events of the realtime socket as typed messages, in both directions. Nothing here knows a session."""
