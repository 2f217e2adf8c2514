"""vLLM's flags, values, environment variables and connectors: each is taken, ignored with a note, or refused with the reason."""
