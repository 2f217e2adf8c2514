"""What vLLM's users bring: its flags, values, environment and connectors, each taken, ignored with a word, or refused with the reason."""
