"""Parts of soak.py: a server and its memory, the requests, and the evaluation."""
