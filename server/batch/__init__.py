"""Runs OpenAI batch files against an application in this process, without sockets: one request and one answer per line."""
