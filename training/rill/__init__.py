"""Makes rill, the bundled model: corpus, training examples, training, export, evaluation."""
