"""OpenAI's Responses API on top of the chat service: input items to messages, deltas to items and numbered events, a store."""
