"""Drafts: tokens that a drafter proposes, and that a step verifies."""
