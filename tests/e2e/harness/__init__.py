"""Harness of the end-to-end tests: stock vLLM engines in child processes, and what they are compared to.

`engine` starts and drives engines, `child` is what runs in them, `protocol` what the two exchange,
`checkpoints` makes tiny random models, `reference` computes the expected results with Hugging Face
transformers, `mixes` makes prompts out of segments.
"""
