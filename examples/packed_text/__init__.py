"""The parts of ``train_packed_text.py``: documents, model, training, report and picture."""
