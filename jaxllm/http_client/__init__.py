"""Talks to any OpenAI-compatible server: a streaming client, and a load generator that measures what comes back."""
