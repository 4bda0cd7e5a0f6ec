"""Effects of interventions: proxies, instruments, measured confounders, and bands."""
