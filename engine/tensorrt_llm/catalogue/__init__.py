"""The rows of the table of settings, by subject. `engine.tensorrt_llm.settings` puts them together."""
