"""Parts of rehearse_attacks.py: a file for each group of attacks, what they are judged by, and the server that they run against."""
