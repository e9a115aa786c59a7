"""The rows of the table of settings, by subject. `engine.tensorrt_llm.configuration.settings` puts them together."""
