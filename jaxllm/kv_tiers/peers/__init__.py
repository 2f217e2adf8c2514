"""Prefill and decode in two engines: one computes a prompt and keeps its blocks in host memory, the other fetches them and continues.

The prefill engine's `PrefillTier` stores blocks as soon as they are full, and holds those of a prompt that has ended under a lease
(`leases`), which its answer names. `server` gives them to decode engines: on the same host as shared memory, else over TCP. In a decode
engine `RemotePrefills` attaches the lease of each request, and `PeerStore` is a store behind its host tier.
"""
