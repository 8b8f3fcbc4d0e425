"""What is taken from XLA: how its compilers differ (`targets`), what they fuse (`fusion`), and the program that their
passes make of the kernels (`module`, `pipelines`)."""
