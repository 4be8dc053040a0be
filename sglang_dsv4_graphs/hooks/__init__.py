"""How the plugin gets into the engine: contracts, patches, their ledger, and what the patches call."""
