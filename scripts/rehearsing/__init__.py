"""What rehearse_faults.py is made of: streams that are watched, and a server with what it may leave behind."""
