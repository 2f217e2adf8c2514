"""Parts of rehearse_faults.py: observed streams, and a server with checks for leftovers."""
