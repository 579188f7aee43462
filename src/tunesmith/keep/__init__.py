"""What keeps a run safe on disk: checkpoints, snapshots, the keeper, resuming."""
