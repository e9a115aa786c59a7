"""What a checkpoint's `config.json` says of its decoder."""
