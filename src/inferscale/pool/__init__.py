"""The KV pool: who is resident where (`table`, pure) and the bytes themselves (`slab`)."""
