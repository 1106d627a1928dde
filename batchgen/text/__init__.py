"""Text to token ids and back: tokenizer, prompts, detokenizer, stop conditions."""
