"""OpenAI's chat completions, answered by the engine that serves the calls."""
