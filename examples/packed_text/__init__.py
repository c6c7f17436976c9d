"""The parts of ``train_packed_text.py``: documents, model, training, and what is shown of them."""
