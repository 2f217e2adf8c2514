"""Replicas on several hosts: each host runs its own engine processes, and the API servers on host 0 reach all of them.

Host 0 stands in for the engine processes of the others (`near`), with sockets where the API servers look for them; another host
stands in for the API servers (`far`). One TCP connection for each host carries their messages, which neither side changes (`wire`).
"""
