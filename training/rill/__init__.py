"""How rill, the bundled model, is made: corpus, pairs, training, export, evaluation."""
