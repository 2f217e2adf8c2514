"""ollama's API on top of the chat service: its errors, its requests as chat requests, its replies line by line."""
