"""Replicas on several hosts: each host runs its own engine processes, and the API servers on host 0 reach all of them.

Host 0 has sockets for remote engine processes where its API servers look for them (`remote_engines`); another host has sockets for the
remote API servers where its engine processes look for them (`local_engines`). One TCP connection for each host carries their messages,
which neither side changes (`wire`).
"""
