"""Client for any OpenAI-compatible server: streaming, and a load generator that measures the answers."""
