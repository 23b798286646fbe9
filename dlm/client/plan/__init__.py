"""Turns a batch into what each shard is asked, and knows where shards are."""
