"""The processes of a run: devices, exchange between ranks, sharded weights, a watch for ranks that die (home of `accelerate`)."""
