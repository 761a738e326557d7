"""Storage of KV pages below the device pool: host memory, then local disk; knows no streams."""
