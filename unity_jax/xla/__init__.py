"""What the cost model takes from XLA: how its compilers differ (`targets`)."""
