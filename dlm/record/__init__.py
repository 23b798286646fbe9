"""The promises of files: privacy records, their signatures, and the ledgers behind them."""
