"""Groups of ops that have an implementation of their own: found in a traced step, whatever library wrote it."""
