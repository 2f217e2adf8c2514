"""Several engine processes with the same model, behind one AsyncCore: data parallelism."""
