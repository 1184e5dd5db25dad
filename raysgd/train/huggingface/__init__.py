"""Libraries of Hugging Face in training functions; see `raysgd.train.huggingface.transformers`."""
