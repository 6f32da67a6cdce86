"""The runtime folder of an engine: what front end and connector share beside the requests themselves.

A lock, the secret that signs plans, a socket for residency and outcomes, and why a start was refused. Knows
neither vLLM nor torch.
"""
