"""``sglang-dsv4-graphs bench``: what the plugin saves, measured beside every other choice a user has."""
