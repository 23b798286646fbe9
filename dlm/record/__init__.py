"""What files promise: privacy records, their signatures, and the ledgers behind them."""
