"""What decoders ask, and when: recorded, made up, scheduled, routed."""
