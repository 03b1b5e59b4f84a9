"""tracekv_fsspec: a persistent KV cache connector on any fsspec URL."""
