"""Anthropic's Messages API on top of the chat service: converts blocks to messages, and deltas to blocks and events."""
