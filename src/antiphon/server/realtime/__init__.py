"""`/v1/realtime`: the OpenAI Realtime protocol over a WebSocket."""
