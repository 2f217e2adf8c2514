"""The parts of scripts/simulate_fleet.py."""
