"""The parts of ``train_packed_text.py``: documents, model, training, ranks, and what is shown of them."""
