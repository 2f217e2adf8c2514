"""ollama's API on top of the chat service: its errors, requests converted to chat requests, replies line by line."""
