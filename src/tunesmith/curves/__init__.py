"""Journal -> series -> charts: the panels that PNG, SVG, report, board and terminal draw."""
