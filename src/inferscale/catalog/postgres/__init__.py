"""The catalog in PostgreSQL: what several replicas share. Loaded only where a catalog's URL is given."""
