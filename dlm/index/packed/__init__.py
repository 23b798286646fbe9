"""Packs and reads the columns of a shard set, with numbers in as few bits as they need."""
