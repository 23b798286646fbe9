"""What a file promises: privacy records, their signatures, and the ledgers behind them."""
