"""Many runs for one result: the search over options, shared by several processes, and the best model of a time budget."""
