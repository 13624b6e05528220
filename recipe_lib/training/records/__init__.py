"""What a run says and writes while it trains."""
