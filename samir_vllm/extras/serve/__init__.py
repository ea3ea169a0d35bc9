"""An OpenAI-compatible server: HTTP in one process, the engine in another. Knows nothing of other extras."""
