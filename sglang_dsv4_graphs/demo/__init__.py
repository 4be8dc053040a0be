"""``sglang-dsv4-graphs demo``: the plugin at work in the real engine, on whatever machine this is."""
