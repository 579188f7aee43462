"""A finished run as one HTML page; several runs compared, with the uncertainty of the difference."""
