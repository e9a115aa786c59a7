"""Makes `models/sentence_encoder`: all-MiniLM-L6-v2 as an int8 ONNX graph for ragged batches."""
