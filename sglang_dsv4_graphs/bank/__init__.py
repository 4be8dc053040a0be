"""What is put into the engine: banks of captured layer ranges, one graph per bucket of rows."""
