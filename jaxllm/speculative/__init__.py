"""Speculative decoding: what proposes the tokens that the target then checks. A file for each kind of drafter."""
