"""Anthropic's Messages API on top of the chat service: blocks to messages, deltas to blocks and events."""
