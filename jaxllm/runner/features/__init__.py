"""What an engine adds to its steps, a file or folder each: see `StepFeature`."""
