"""What crosses between shards and the caller: buffers, infos, reports."""
