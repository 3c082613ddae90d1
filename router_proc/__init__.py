"""The router process: admission, placement, the journal, deadlines, and the metrics of all processes."""
