"""The configuration of a decoder, as read from a checkpoint's `config.json`."""
