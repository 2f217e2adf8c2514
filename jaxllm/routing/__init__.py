"""Chooses one of several engines with the same model for a request."""
