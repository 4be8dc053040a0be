"""What runs between the segments of a replay, leaner than the engine's eager code and equal to it."""
