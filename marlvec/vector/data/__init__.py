"""Data passed between shards and the caller: buffers, infos, reports."""
