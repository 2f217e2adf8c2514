"""OpenAI's Responses API on top of the chat service: converts input items to messages, deltas to items and events; a store."""
