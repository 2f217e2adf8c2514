"""What soak.py is made of: a server and its memory, the requests, and what they prove."""
