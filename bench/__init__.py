"""Benches: one script per question, each run as `python -m bench.<name>`, each printing one table."""
